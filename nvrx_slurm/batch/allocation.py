"""What a job needs that runs in an allocation of the user's, and that sbatch's flags give to a job of our own.

- A notice ahead of the time limit (`--signal`): the batch host asks Slurm when the allocation ends.
- The survival of a lost node (`--no-kill`): Slurm ends an allocation that was made without it as soon as it has
  declared one of its nodes down, SlurmdTimeout after the node's last answer. No user can set the flag later, but the
  owner of a job may make it smaller (scontrol(1), "NodeList"), and what Slurm does about a node is no matter of
  a job that has given it up. So a node that stays silent is given up before Slurm gives up the job.
  See docs/decisions/0037.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from nvrx_slurm.cluster.allocation import HeldAllocation
from nvrx_slurm.jobspec.model import FaultToleranceSpec
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger

log = get_logger("batch")

# How long a node may be silent at most before it is given up, and half of SlurmdTimeout where that is less: a slurmd
# that is restarted answers again within seconds.
GIVEN_UP_WITHIN_S = 30.0

LOOK_S, ASK_AGAIN_S = 1.0, 10.0


class AllocationKeeper:
    """Of one job, in Slurm's job `job_id`."""

    def __init__(self, job_id: str, slurm: HeldAllocation, bounds: FaultToleranceSpec, clock: Clock) -> None:
        self._job_id, self._slurm, self._bounds, self._clock = job_id, slurm, bounds, clock
        self._shrinking = asyncio.Lock()  # two updates of one list of nodes must not cross
        self.gave_up = False
        """Whether a node was given up: no srun whose step it was in ever ends by itself."""

    async def watch_time_limit(self, on_notice: Callable[[], None]) -> None:
        """Call `on_notice` ahead of the allocation's time limit, as late as the teardown allows."""
        while (left_s := await self._slurm.time_left_s()) is None:  # noqa: ASYNC110  slurmctld has no events
            await asyncio.sleep(ASK_AGAIN_S)
        if left_s == math.inf:
            return
        ahead_s = self._bounds.teardown.notice_s(left_s)  # by the whole time: at most half of it may go into the end
        while left_s - ahead_s > LOOK_S:
            await asyncio.sleep(left_s - ahead_s)
            # Ask again: `scontrol update TimeLimit=` may have moved it. Without an answer it is where it was.
            found_s = await self._slurm.time_left_s()
            if found_s == math.inf:
                return
            left_s = ahead_s if found_s is None else found_s
        log.info("the time limit of the allocation %s is %.0f s away", self._job_id, left_s)
        on_notice()

    async def node_lost(self, node: str) -> None:
        """The node's agent is gone. Give the node up, should its slurmd be gone too."""
        timeout_s = await self._slurm.slurmd_timeout_s()
        silent_s = min(GIVEN_UP_WITHIN_S, timeout_s / 2) if timeout_s else GIVEN_UP_WITHIN_S
        deadline, known = self._clock.monotonic() + silent_s, None
        while self._clock.monotonic() < deadline:
            # Asked until it answers: the loss of many nodes at once keeps slurmctld busy.
            known = known or (await self._slurm.nodes([node])).get(node)
            if known is not None and await self._slurm.answers(known):
                return  # the agent alone was lost
            await asyncio.sleep(LOOK_S)
        if known is None:
            log.warning("%s is lost, and Slurm does not say where its slurmd listens: the node is kept", node)
            return
        async with self._shrinking:
            deadline, held = self._clock.monotonic() + silent_s, await self._slurm.allocated()
            while held is None and self._clock.monotonic() < deadline:
                await asyncio.sleep(LOOK_S)
                held = await self._slurm.allocated()
            if held is None or node not in held or len(held) == 1:
                return
            await self._slurm.shrink_to([each for each in held if each != node])
            held = await self._slurm.allocated()
        if held is not None and node not in held:
            self.gave_up = True
            log.warning("%s does not answer: the allocation %s goes on without it", node, self._job_id)
        else:
            log.error("%s does not answer, and Slurm did not let the allocation go on without it", node)
