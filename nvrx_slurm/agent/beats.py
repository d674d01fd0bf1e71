"""How workers tell their steps: a slot of shared memory each, and one datagram for the first step of a cycle."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from nvrx_slurm.errors import UntrustedRecord
from nvrx_slurm.journal.restarts import LONGEST_BYTES, InProcessRestart, decode
from nvrx_slurm.workload.slot import Reading, Slot


class ProgressBoard:
    """The slots of this node's workers, by rank; and the socket on which they tell what must be known at once:
    `<rank> <step>`, the first step (`workload.beat`); `!<rank> <pid> <error>`, that an uncaught exception is about to
    end the worker (`stacks/hook`); or `{…}`, that its group has restarted in process (`inprocess/timeline.py`).

    `folder` is new and this agent's alone; `close` removes it."""

    def __init__(
        self,
        folder: Path,
        on_first_step: Callable[[int, int], None],
        on_failing: Callable[[int, int, str], None],
        on_restart: Callable[[InProcessRestart], None],
    ) -> None:
        self._folder = folder
        self._on_first_step, self._on_failing, self._on_restart = on_first_step, on_failing, on_restart
        self._slots: dict[int, Slot] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def open(self) -> None:
        """Listen for first steps."""
        self._socket.setblocking(False)
        self._socket.bind(str(self._folder / "s"))
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def prepare(self, rank: int, cycle: int) -> dict[str, str]:
        """A fresh slot for a worker; returns what its environment must say."""
        path = self._folder / f"{cycle}.{rank}"
        self._slots[rank] = Slot.create(path)
        return {"NVRX_BEAT_FILE": str(path), "NVRX_BEAT_SOCKET": str(self._folder / "s")}

    def clear(self) -> None:
        """The cycle is over: forget its slots."""
        self._slots.clear()
        for path in self._folder.glob("*.*"):
            path.unlink(missing_ok=True)

    def steps(self) -> dict[int, int]:
        """Rank → last step, of those workers that told one."""
        told = ((rank, reading.step) for rank, reading in self.readings().items())
        return {rank: step for rank, step in told if step is not None}

    def readings(self) -> dict[int, Reading]:
        """Rank → what its worker has told by now. Judge them by a moment that was taken before this call."""
        return {rank: slot.read() for rank, slot in self._slots.items()}

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                said = self._socket.recv(LONGEST_BYTES)
                with contextlib.suppress(ValueError, UntrustedRecord):
                    self._pass_on(said)

    def _pass_on(self, said: bytes) -> None:
        """Raises ValueError or UntrustedRecord for what is none of the three, or not of a worker of this node.

        Any process of the user's can write here, in any language.
        """
        if said.startswith(b"!"):
            rank, pid, what = said[1:].decode(errors="replace").split(" ", 2)
            self._on_failing(self._rank(rank), int(pid), what)
        elif said.startswith(b"{"):
            self._on_restart(decode(said))
        else:
            rank, step = said.decode().split()
            if not 0 <= int(step) < 1 << 63:
                raise ValueError("a step must be from 0 to 2**63 - 1")
            self._on_first_step(self._rank(rank), int(step))

    def _rank(self, text: str) -> int:
        if int(text) not in self._slots:
            raise ValueError(f"rank {text[:20]} is none of this node's")
        return int(text)
