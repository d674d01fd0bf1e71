"""What a simulated kernel holds for its processes: it closes with its last holder, by whatever death."""

from __future__ import annotations

from collections.abc import Callable

from nvrx_slurm.lab.simulation.datagrams import Mailbox
from nvrx_slurm.lab.simulation.process import Process


class Held:
    """Something open, that closes with its last holder."""

    def __init__(self, closed: Callable[[], None]) -> None:
        self._closed = closed
        self._holders: list[Process] = []

    def held_by(self, process: Process) -> None:
        self._holders.append(process)
        process.on_death(lambda: self.release(process))

    def release(self, process: Process) -> None:
        if process in self._holders:
            self._holders.remove(process)
            if not self._holders:
                self._closed()


class SimulatedFenceSocket(Held):
    """A node's fence socket: where its fence key arrives. Held by the agent until the supervisor has it."""

    def __init__(self, key: bytes, agent: Process) -> None:
        super().__init__(self._close)
        self.key = key
        self.armed_by: Process | None = None
        self._agent = agent
        self._mailbox: Mailbox | None = None
        self.held_by(agent)

    def open_at(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def getsockname(self) -> tuple[str, int]:
        assert self._mailbox is not None
        return self._mailbox.host, self._mailbox.port

    def filenos(self) -> list[int]:
        return [self.getsockname()[1]]

    def close(self) -> None:
        self.release(self._agent)

    def arrives(self, message: bytes) -> None:
        """A datagram: the filter lets only the key through."""
        if message == self.key and self.armed_by is not None:
            self.armed_by.kill()

    def _close(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()
