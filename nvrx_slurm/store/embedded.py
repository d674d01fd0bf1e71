"""An embedded store: one server for one job, or for the ranks of one host, as a child of its keeper."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import msgspec

from nvrx_slurm.errors import StoreUnreachable
from nvrx_slurm.store.link import short_path
from nvrx_slurm.store.servers import bundled_binary
from nvrx_slurm.util.files import open_log
from nvrx_slurm.util.processes import send_signal

# How long the server may take to load its append-only file and accept connections.
READY_S = 30.0

# How long a start that has failed waits for the server that it has killed.
KILLED_S = 5.0

# In lower case: Redis 7.0 and Valkey write it differently.
_READY = b"ready to accept connections"


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


def free_port(host: str) -> int:
    """A TCP port that is free at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def new_socket_name(folder: Path) -> str | None:
    """A name for a unix socket in a folder, which no socket has had before. None where the folder's file system holds
    no sockets."""
    name = f"s{secrets.token_hex(4)}"
    try:
        with short_path(folder / name) as path, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.bind(path)
        (folder / name).unlink()
    except OSError:
        return None
    return name


class Certificate(msgspec.Struct, frozen=True):
    """A certificate for one job's store: files in PEM. It is pinned: `store.json` holds it, and clients trust no
    other."""

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
        # Made before OpenSSL writes it: no umask, and no version of OpenSSL, lets another user read the key.
        made.key.touch(mode=0o600)
        made.key.chmod(0o600)
        done = subprocess.run([openssl, *words], capture_output=True, text=True, timeout=OPENSSL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its certificate could not be made: {error}"
    if done.returncode != 0:
        return f"its certificate could not be made: {done.stderr.strip()[-300:]}"
    return made


def _quoted(path: Path) -> str:
    """A path as the server's configuration holds it."""
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'


async def kill_server(server: Process) -> None:
    """End a server that is given up: the next one uses the same files."""
    send_signal(server, signal.SIGKILL)
    # A process that waits for a dead file system does not end: why it is given up counts for more than its exit.
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(server.wait(), KILLED_S)


class EmbeddedStore(msgspec.Struct, eq=False):
    """One server. It can be started again after a crash, and nothing recorded is lost, since each command reaches the
    append-only file (the kernel's page cache) before its answer is sent.

    It listens on a unix socket `name` in its folder, else on a free port of `bind`, with TLS where there is
    a `certificate`. It answers a client that asks as `link.MARK` does with `mark`. `binary`: the server (default: the
    bundled one).
    """

    folder: Path
    password: str
    bind: str = "127.0.0.1"
    name: str | None = None
    certificate: Certificate | None = None
    mark: str | None = None
    binary: Path | None = None
    adopt: Callable[[], None] | None = None
    port: int = 0
    _drain: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"EmbeddedStore({str(self.folder)!r})"  # a password never comes into a log

    def url(self, host: str) -> str:
        """Where it listens. `host`: the name or address by which clients reach this machine."""
        if self.name is not None:
            return f"unix://{quote(str(self.folder.absolute() / self.name))}"
        return f"{'rediss' if self.certificate else 'redis'}://{host}:{self.port}"

    async def start(self) -> Process:
        """Start the server and wait until it answers. Raises StoreUnreachable with the end of its log."""
        for _ in range(5):
            # A port that clients have been given stays, also where it is taken now: only a new one may be exchanged.
            fresh = self.port == 0 and self.name is None
            if fresh:
                self.port = free_port("" if self.bind == "*" else self.bind)
            try:
                return await asyncio.wait_for(self._start_once(), READY_S)
            except StoreUnreachable as error:
                if not fresh or "bind" not in str(error).lower():
                    raise
                self.port = 0  # another process was faster: try another port
            except OSError as error:  # a TimeoutError too
                said = str(error) or f"it did not answer in {READY_S:.0f} s"
                raise StoreUnreachable(f"the embedded store cannot be started: {said}") from error
        raise StoreUnreachable("the embedded store finds no free port on this host")

    async def _start_once(self) -> Process:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        server = await asyncio.create_subprocess_exec(
            str(self.binary or bundled_binary()),
            "-",
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            cwd=self.folder,
            preexec_fn=self.adopt,
            # The socket, and the file with all of the job's records, are this user's alone.
            umask=0o077,
        )
        assert server.stdin is not None and server.stdout is not None
        try:
            # By its standard input: the password is in no file and no argv.
            server.stdin.write(self._config().encode())
            server.stdin.close()
            lines: list[bytes] = []
            while line := await server.stdout.readline():
                lines = [*lines[-20:], line]
                if _READY in line.lower():
                    self._drain = asyncio.create_task(self._log_rest(server.stdout, lines))
                    return server
            await server.wait()
        except BaseException:
            # It was not ready in time, and no other code can end this process.
            await kill_server(server)
            raise
        raise StoreUnreachable("the embedded store did not start:\n" + b"".join(lines[-8:]).decode(errors="replace"))

    def _config(self) -> str:
        if self.name is not None:
            # Its working folder is its own: a path from there is never too long for a socket's address.
            listen = ["port 0", f"unixsocket {self.name}", "unixsocketperm 700"]
        elif self.certificate is None:
            listen = [f"port {self.port}", f"bind {self.bind}"]
        else:
            listen = [
                "port 0",
                f"tls-port {self.port}",
                f"bind {self.bind}",
                f"tls-cert-file {_quoted(self.certificate.certificate)}",
                f"tls-key-file {_quoted(self.certificate.key)}",
                "tls-auth-clients no",  # clients prove themselves by the password
                'tls-protocols "TLSv1.2 TLSv1.3"',
            ]
        return "\n".join(
            [
                *listen,
                f'requirepass "{self.password}"',
                *([f'masterauth "{self.mark}"'] if self.mark else []),
                f"dir {_quoted(self.folder)}",
                "appendonly yes",
                # A crash of the server loses nothing either way; a crash of this host ends the allocation.
                "appendfsync no",
                'save ""',
                "tcp-backlog 4096",
                "maxclients 65000",
                "",
            ]
        )

    async def _log_rest(self, stdout: asyncio.StreamReader, lines: list[bytes]) -> None:
        with os.fdopen(open_log(self.folder / "server.log"), "ab", buffering=0) as log:
            while lines:  # to the end, also where the disk is full: a server whose pipe is full stops
                with contextlib.suppress(OSError):
                    log.write(b"".join(lines))
                lines = [line] if (line := await stdout.readline()) else []
