"""The state of the node, written into `health/<node>.txt` beside the workers' logs.

One look after the other, each in a thread beside the agent's loop. Where the kernel or a file system does not answer,
the look is given up, its thread is left behind, and the rest of its lines are lost.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from nvrx_slurm.diagnostics import resources
from nvrx_slurm.diagnostics.kernel import KernelLog
from nvrx_slurm.diagnostics.resources import MemoryCgroup, memory_cgroup
from nvrx_slurm.diagnostics.stacks import programs
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.files import open_log, write_all
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.threads import awaitable_thread

log = get_logger("agent")
_T = TypeVar("_T")

# How long one look may take; nvidia-smi has as long again.
LOOK_S = 1.0

# When, in seconds since the epoch, and what.
_Line = tuple[float, str]


class _Since(msgspec.Struct):
    """What was known of the node when the cycle began: all later is news. `kernel` is None where its log cannot be
    read; `why` says why not."""

    wall_s: float
    kernel: KernelLog | None
    why: str
    cgroup: MemoryCgroup | None
    oom_kills: int


class NodeHealth:
    """Looks at the node. `folders`: those whose file systems the job needs."""

    def __init__(self, node: str, folders: Iterable[Path], clock: Clock) -> None:
        self._node, self._clock = node, clock
        self._folders = tuple(dict.fromkeys(folders))
        self._since: _Since | None = None
        self._turn: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """A cycle begins: only what happens from now on is its news. Returns at once."""
        self._take_turn(self._begin())

    def look(self, out: Path, why: str) -> None:
        """Write down how the node is, and its news, below the folder `out`. Returns at once."""
        self._take_turn(self._look(out, why))

    def look_for_news(self, out: Path) -> None:
        """Write down what has happened on the node since the last look, if anything. Returns at once."""
        self._take_turn(self._bounded(partial(self._write_news, out), "node news"))

    async def close(self) -> None:
        """Let the look that is on come to its end, within its bound."""
        if self._turn is not None:
            await asyncio.wait([self._turn], timeout=LOOK_S)
            self._turn.cancel()

    # ---- in turn

    def _take_turn(self, work: Coroutine[Any, Any, None]) -> None:
        self._turn = asyncio.get_running_loop().create_task(self._in_turn(self._turn, work))

    async def _in_turn(self, earlier: asyncio.Task[None] | None, work: Coroutine[Any, Any, None]) -> None:
        if earlier is not None:
            # Not `await earlier`: an error of that look, or its cancellation, is not one of this look.
            await asyncio.wait([earlier])
        try:
            await work
        except Exception as error:  # evidence is welcome; the job does not depend on it
            log.warning("the node's state was not written down: %r", error)

    async def _begin(self) -> None:
        # None until it is known: the thread closes the kernel log of the cycle before, also where it is given up, and
        # no later look may read from that descriptor.
        earlier, self._since = self._since, None
        self._since = await self._bounded(partial(self._now, earlier), "node begin")

    async def _look(self, out: Path, why: str) -> None:
        await self._bounded(partial(self._write_all, out, why), "node look")
        # nvidia-smi is a process of its own, with a bound of its own: no thread of this one waits for it.
        if program := await programs.find("nvidia-smi", LOOK_S):
            said = await programs.run(program, *resources.GPU_QUERY, timeout_s=LOOK_S)
            lines = [(self._clock.wall(), f"gpu {row}") for row in resources.gpu_rows(said.text)]
            await self._bounded(partial(self._append, out, lines), "node GPUs")

    async def _bounded(self, work: Callable[[], _T], name: str) -> _T | None:
        done, _ = await asyncio.wait([future := awaitable_thread(work, name)], timeout=LOOK_S)
        if not done:
            log.warning("the node's state could not be read within %g s (%s)", LOOK_S, name)
            return None
        return future.result()

    # ---- in a thread

    def _now(self, earlier: _Since | None) -> _Since:
        if earlier is not None and earlier.kernel is not None:
            earlier.kernel.close()
        cgroup, kernel, why = memory_cgroup(), None, ""
        try:
            kernel = KernelLog()
        except OSError as error:
            why = error.strerror or str(error)
        kills = cgroup.oom_kills() if cgroup is not None else None
        return _Since(self._clock.wall(), kernel, why, cgroup, kills or 0)

    def _write_news(self, out: Path) -> None:
        if self._since is not None:
            self._append(out, list(self._news(self._since)))

    def _write_all(self, out: Path, why: str) -> None:
        now, since = self._clock.wall(), self._since
        lines = [(now, f"health: {self._node}: {why}")]
        if since is not None:
            if since.kernel is None:
                lines.append((now, f"health: /dev/kmsg: {since.why}; what the kernel says is not to be seen"))
            lines += self._news(since)
        usage = since.cgroup.usage() if since is not None and since.cgroup is not None else ()
        for kind, found in (
            ("memory", resources.memory()),
            ("cgroup", usage),
            ("pressure", resources.pressure()),
            ("load", resources.load()),
        ):
            lines += [(now, f"{kind}: {line}") for line in found]
        self._append(out, lines)
        for line in resources.disks(self._folders):  # last, and each by itself: a file system may block for ever
            self._append(out, [(now, f"disk: {line}")])

    def _news(self, since: _Since) -> Iterator[_Line]:
        now = self._clock.wall()
        if since.kernel is not None:
            booted_s = now - self._clock.monotonic()
            for message in since.kernel.news():
                # The kernel's clock drifts; the message is certainly from this cycle.
                at_s = min(max(booted_s + message.at_s, since.wall_s), now)
                yield at_s, f"{'kernel' if message.facility == 0 else 'kmsg'}: {message.text}"
        kills = since.cgroup.oom_kills() if since.cgroup is not None else None
        if since.cgroup is not None and kills is not None and kills > since.oom_kills:
            yield now, f"cgroup: memory.events: oom_kill={kills - since.oom_kills} more in {since.cgroup.folder}"
            since.oom_kills = kills

    def _append(self, out: Path, lines: list[_Line]) -> None:
        if not lines:
            return
        stamps = [datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ") for at_s, _ in lines]
        text = "".join(f"{stamp} {line}\n" for stamp, (_, line) in zip(stamps, lines, strict=True))
        descriptor = open_log(out / f"{self._node}.txt")
        try:
            write_all(descriptor, text.encode(errors="replace"))
        finally:
            os.close(descriptor)
