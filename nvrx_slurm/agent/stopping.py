"""The stop of this node's workers as the agent sees it: what it asks for, the current phase, what follows.

The supervisor carries it out (`supervisor.py`), in the phases of `teardown.py`. Afterwards the GPUs' memory must be
free: the driver gives that of a killed worker back some time after its death.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from functools import partial

from nvrx_slurm.agent.events import Cycle
from nvrx_slurm.agent.machine import BoardPort, WorkersPort
from nvrx_slurm.agent.stacks import DUMP_FIRST_S, Dumping
from nvrx_slurm.agent.workers import Tearing
from nvrx_slurm.diagnostics.stacks import programs
from nvrx_slurm.jobspec.model import FaultToleranceSpec
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger

log = get_logger("agent")

MOST_NAMED = 8


class Stopping:
    """One stop at a time. `then`: what comes when no worker is left; `phase`: of the teardown that is on; `began`:
    when the last one did, on the agent's clock."""

    def __init__(
        self, bounds: FaultToleranceSpec, *, workers: WorkersPort, board: BoardPort, dumping: Dumping, clock: Clock
    ) -> None:
        self._bounds, self._workers, self._board, self._dumping = bounds, workers, board, dumping
        self._clock = clock
        self._is_on = self._is_sent = False
        self.began = 0.0
        self._saved_before: dict[int, int] = {}
        self.then: Callable[[], object] | None = None
        self.phase: str | None = None

    def stop(
        self,
        cycle: Cycle | None,
        then: Callable[[], object],
        *,
        grace_s: float | None = None,
        checkpoint: bool = False,
        dump: str | None = None,
    ) -> None:
        """Stop all workers, then go on with `then`; a later call replaces the `then` of an earlier one.

        A later call without a grace skips to the kill.
        """
        self.then = then
        begins, self._is_on = not self._is_on, True
        if begins:
            self.began, self._is_sent = self._clock.monotonic(), False
        # Stacks come before the stop signal: after it they would show how the workers end, not where they hang.
        if begins and dump and cycle is not None and cycle.running and not cycle.dumped and grace_s != 0.0:
            self._dumping.begin(cycle, dump, DUMP_FIRST_S, then=partial(self._send, grace_s, checkpoint))
        elif begins or grace_s == 0.0:
            self._send(grace_s, checkpoint)

    def over(self) -> Callable[[], object] | None:
        """No worker is left. Returns what comes next."""
        # Nothing more is sent: a dump that this stop has begun may end when the supervisor is another one, and the
        # workers are the next cycle's.
        self._is_on, self._is_sent, self.phase = False, True, None
        then, self.then = self.then, None
        return then

    def took_s(self) -> float:
        """Seconds since the last stop began."""
        return self._clock.monotonic() - self.began

    def goes_on(self, event: Tearing, cycle: Cycle | None) -> None:
        """Called once a phase, and once a second of it."""
        ranks = {pid: rank for rank, pid in cycle.pids.items()} if cycle else {}
        pids = sorted(event.left, key=lambda pid: (pid not in ranks, ranks.get(pid, pid)))
        left = ", ".join(f"rank {ranks[pid]}" if pid in ranks else f"process {pid}" for pid in pids[:MOST_NAMED])
        more = f" and {len(event.left) - MOST_NAMED} more" if len(event.left) > MOST_NAMED else ""
        log.info("teardown: %s; left: %s%s; %.1f s left of it", event.phase, left, more, event.ends_in_s)
        begins, self.phase = self.phase != event.phase, event.phase
        if event.phase == "checkpoint" and cycle is not None:
            # Workers that save in a section named "checkpoint" are done once each has ended one since the request.
            # For the others the phase lasts until they exit.
            saved = {
                rank: reading.seen.get("checkpoint", (0, 0.0))[0] for rank, reading in self._board.readings().items()
            }
            if begins:
                self._saved_before = saved
            elif all(saved.get(rank, 0) > self._saved_before.get(rank, 0) for rank in cycle.running):
                self._workers.phase_done("checkpoint")
        if begins and event.phase == "dump" and cycle is not None:
            why = "still there after the stop signal"
            done = partial(self._workers.phase_done, "dump")
            self._dumping.begin(cycle, why, event.ends_in_s, then=done)

    def _send(self, grace_s: float | None, checkpoint: bool) -> None:
        if self._is_sent and grace_s != 0.0:  # the dump has ended after a kill that did not wait for it
            return
        bounds = self._bounds
        self._is_sent = True
        saving = None
        if checkpoint and bounds.teardown.checkpoint_signal is not None:
            saving = (signal.Signals[bounds.teardown.checkpoint_signal], bounds.teardown.checkpoint_timeout)
        self._workers.stop(
            bounds.teardown.grace if grace_s is None else grace_s, signal.Signals[bounds.teardown.stop_signal], saving
        )


ASK_EVERY_S = 0.5
ANSWER_S = 10.0
MIB = 1 << 20


async def used_bytes() -> list[int] | None:
    """Memory in use on each GPU of this node, by nvidia-smi; None: there is none, or it does not say."""
    program = await programs.find("nvidia-smi", ANSWER_S)
    if program is None:
        return None
    said = await programs.run(program, "--query-gpu=memory.used", "--format=csv,noheader,nounits", timeout_s=ANSWER_S)
    try:
        return [int(line) * MIB for line in said.text.split()] if said.ok else None
    except ValueError:
        return None


async def reclaim(below_bytes: int, budget_s: float, clock: Clock) -> float:
    """Wait until every GPU uses less than `below_bytes`, up to `budget_s`. Returns how long that took, in seconds.

    Without nvidia-smi there is nothing to wait for.
    """
    began = clock.monotonic()
    while (used := await used_bytes()) is not None and max(used, default=0) >= below_bytes:
        took_s = clock.monotonic() - began
        if took_s >= budget_s:
            log.warning("GPU memory is still in use after %.0f s: %s MiB; going on", took_s, [b // MIB for b in used])
            break
        log.info("waiting for GPU memory: %s MiB used, %.0f s left", [b // MIB for b in used], budget_s - took_s)
        await asyncio.sleep(ASK_EVERY_S)
    return clock.monotonic() - began
