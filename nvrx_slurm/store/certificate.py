"""A certificate for one job's store. It is pinned: `store.json` holds it, and clients trust no other."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

OPENSSL_S = 10.0

_REQUEST = """
[req]
distinguished_name = name
x509_extensions = extensions
prompt = no
[name]
CN = nvrx-slurm store
[extensions]
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
extendedKeyUsage = serverAuth
"""


@dataclass(frozen=True, slots=True)
class Certificate:
    """`certificate` and `key` are files in PEM."""

    certificate: Path
    key: Path

    def pem(self) -> str:
        return self.certificate.read_text()


def make_certificate(folder: Path) -> Certificate | str:
    """A new key and its certificate, in a folder that only its owner can enter; or why there is none."""
    # Python's `ssl` can make no certificate, and a library that can is too much for this one. OpenSSL's command is
    # on nearly every machine that has a server with TLS.
    openssl = shutil.which("openssl")
    if openssl is None:
        return "there is no `openssl` command here to make its certificate"
    made = Certificate(folder / "certificate.pem", folder / "key.pem")
    request = folder / "certificate.cnf"
    words = ["req", "-x509", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-sha256"]
    words += ["-days", "3650", "-config", str(request), "-keyout", str(made.key), "-out", str(made.certificate)]
    try:
        request.write_text(_REQUEST)
        made.key.touch(mode=0o600)
        made.key.chmod(0o600)
        done = subprocess.run([openssl, *words], capture_output=True, text=True, timeout=OPENSSL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its certificate could not be made: {error}"
    if done.returncode != 0:
        return f"its certificate could not be made: {done.stderr.strip()[-300:]}"
    return made
