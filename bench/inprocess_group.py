"""A group of ranks on this host, each a process that was started by exec: of nvrx-slurm, or of NVRx."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.errors import BenchTimeout, PeerFailed
from bench.stage import kill, send_line, start_store
from nvrx_slurm.jobspec import env
from nvrx_slurm.store.embedded import free_port
from nvrx_slurm.util.processes import dies_with_parent

ROOT = Path(__file__).parent.parent
PROGRAM = Path(__file__).with_name("inprocess_rank.py")
START_S = 240.0
STEP_S = 120.0
OURS, NVRX = "nvrx-slurm", "NVRx"
SIDES = (OURS, NVRX)
NEEDS = ("torch", "nvidia_resiliency_ext", "hiredis")
"""Of the one interpreter that runs both sides, with the same torch."""

ENDED = ["ended"]

Options = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Valkey:
    """The real server, as a job's embedded store is."""

    url: str
    password_file: Path
    process: Process


@contextlib.asynccontextmanager
async def valkey(room: Path) -> AsyncIterator[Valkey]:
    """It runs until the block is left."""
    async with contextlib.AsyncExitStack() as stack:
        url, password, process = await start_store(stack, room / "store")
        file = room / "password"
        file.touch(mode=0o600)  # before it holds the password
        file.write_text(password)
        yield Valkey(url, file, process)


@dataclass
class Group:
    """Processes by their first rank, and what they have printed."""

    processes: dict[int, Process]
    log: Path
    lines: asyncio.Queue[tuple[int, list[str]]] = field(default_factory=asyncio.Queue)
    ended: set[int] = field(default_factory=set)  # as they should
    entered: dict[int, dict[int, float]] = field(default_factory=dict)  # iteration → rank → stamp

    def send_line(self, rank: int, order: str) -> None:
        send_line(self.processes[rank], order)

    def kill(self, rank: int) -> None:
        self.ended.add(rank)
        os.kill(self.processes[rank].pid, signal.SIGKILL)

    async def until_entered(self, iteration: int, size: int) -> float:
        """The moment when the last of so many ranks was in the function. Raises BenchTimeout, PeerFailed."""
        while len(there := self.entered.setdefault(iteration, {})) < size:
            rank, words = await self._next()
            if words[0] == "entered":
                self.entered.setdefault(int(words[1]), {})[rank] = float(words[2])
        return max(there.values())

    async def until_printed(self, word: str) -> float:
        """The number that some rank prints after this word."""
        while True:
            _, words = await self._next()
            if words[0] == word:
                return float(words[1])

    async def _next(self) -> tuple[int, list[str]]:
        try:
            rank, words = await asyncio.wait_for(self.lines.get(), STEP_S)
        except TimeoutError:
            raise BenchTimeout(
                f"no rank printed a line in {STEP_S:.0f} s; their log ends with:\n{self._log_end}"
            ) from None
        if words == ENDED and rank not in self.ended:
            raise PeerFailed(f"rank {rank} has ended; the log ends with:\n{self._log_end}")
        return rank, words

    @property
    def _log_end(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    async def read_lines(self, rank: int) -> None:
        stdout = self.processes[rank].stdout
        assert stdout is not None
        async for line in stdout:
            self.lines.put_nowait((rank, line.decode().split()))
        self.lines.put_nowait((rank, ENDED))

    async def finish(self) -> None:
        """All return. Raises PeerFailed for a rank that then fails."""
        living = {rank: process for rank, process in self.processes.items() if process.returncode is None}
        for rank in living:
            self.send_line(rank, "return")
        async with asyncio.timeout(STEP_S):
            codes = {rank: await process.wait() for rank, process in living.items()}
        if any(codes.values()):
            raise PeerFailed(f"exit codes by rank: {codes}; their log: {self._log_end}")


@contextlib.asynccontextmanager
async def group(
    python: Path, side: str, size: int, options: Options, store: Valkey, room: Path
) -> AsyncIterator[Group]:
    """So many ranks, all in the function for the first time; killed when the block is left."""
    log = room / f"{side}.log"
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1")), "WORLD_SIZE": str(size)}
    given = json.dumps({**options, "url": store.url, "password_file": str(store.password_file)})
    argv = [str(python), str(PROGRAM), side, given]
    started = Group({}, log)
    with log.open("ab") as output:
        for rank in range(size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(ROOT)}
            started.processes[rank] = await asyncio.create_subprocess_exec(
                *argv,
                stdin=PIPE,
                stdout=PIPE,
                stderr=output,
                env=env.child_environment({**shared, **own}),
                preexec_fn=dies_with_parent(signal.SIGKILL),
            )
    readers = [asyncio.create_task(started.read_lines(rank)) for rank in started.processes]
    try:
        async with asyncio.timeout(START_S):
            await started.until_entered(0, size)
        yield started
    finally:
        for process in started.processes.values():
            await kill(process)
        await asyncio.gather(*readers)
