"""A real Valkey for the ranks of scenarios, which can be killed and started again."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import redis

from nvrx_slurm.lab.devcluster.lifecycle import free_ports
from nvrx_slurm.store.servers import bundled_binary
from tests.inprocess.logs import WAIT_S, until_logged

READY = "Ready to accept connections"
LIFETIME_S = 2 * 3600
"""The longest time that a key may outlive its group."""


class Valkey:
    """A server with an append-only file, so that nothing is lost when it is killed."""

    def __init__(self, folder: Path, password: str = "") -> None:
        self._folder, self._password = folder, password
        self.port = free_ports(1)[0]
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server, and return once it accepts connections."""
        self._folder.mkdir(exist_ok=True)
        options = {"port": self.port, "bind": "127.0.0.1", "requirepass": self._password, "save": ""}
        options |= {"appendonly": "yes", "appendfsync": "no"}
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        log = self._folder / "server.log"
        log.unlink(missing_ok=True)
        self._process = subprocess.Popen([bundled_binary(), *flags, "--dir", self._folder, "--logfile", log])
        until_logged(log, READY)

    def revive(self) -> None:
        """Start the server again if it has ended: a test that fails may kill all children of the test process."""
        if self._process.poll() is not None:
            self.start()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def lose(self) -> None:
        """Delete all data of the running server."""
        with redis.Redis(port=self.port) as client:
            client.flushall()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def freeze(self) -> None:
        self.send(signal.SIGSTOP)

    def end(self) -> None:
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)
        self._process.wait()

    def until_key(self, *words: str) -> None:
        """Wait for a key whose name contains these words in this order."""
        deadline = time.monotonic() + WAIT_S
        with redis.Redis(port=self.port) as client:
            while not any(client.scan_iter(f"*{'*'.join(words)}*")):
                assert time.monotonic() < deadline, f"no key has {words}"

    def keys(self, *, of: str = "") -> dict[str, int]:
        """The keys whose names contain `of`, with the seconds until they expire; -1 for a key without an expiry."""
        with redis.Redis(port=self.port, decode_responses=True) as client:
            return {name: int(client.ttl(name)) for name in client.scan_iter(f"*{of}*")}
