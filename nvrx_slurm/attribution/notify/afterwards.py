"""What follows a decision, for one job: everybody who wants to know of it is told, in his own time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from nvrx_slurm.attribution.ledger import cluster_of
from nvrx_slurm.attribution.notify.courier import Courier
from nvrx_slurm.attribution.notify.dataflow import Dataflow
from nvrx_slurm.attribution.notify.decided import Decided
from nvrx_slurm.attribution.notify.receiver import Flushed, Patience, bounded
from nvrx_slurm.attribution.notify.slack import Slack
from nvrx_slurm.attribution.notify.spool import Spool
from nvrx_slurm.attribution.notify.suspicion import Suspicion
from nvrx_slurm.errors import UsageError
from nvrx_slurm.jobspec.model import AttributionSpec
from nvrx_slurm.journal.folder import JobFolder, JobInfo
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.log import get_logger

log = get_logger("postprocessing")


class Afterwards:
    """Tells Slack, the index and the ledger of each decided failure, as far as the plan names them.

    What is to be told goes into `folder`/spool first, and is told from there, in order: what an outage or the end of
    this process leaves there, the next `decided` or `flush` makes up for. `folder` is the job's own, or the
    one that a service keeps for that job: where it holds no job.json, no nodes are blamed.
    """

    def __init__(
        self, plan: AttributionSpec, folder: Path, *, clock: Clock | None = None, patience: Patience | None = None
    ) -> None:
        self._plan, self._folder = plan, folder
        self._clock, self._patience = clock or SystemClock(), patience or Patience()
        self._couriers: asyncio.Task[list[Courier]] | None = None
        self._rounds: dict[str, asyncio.Task[Flushed]] = {}
        self._missed: set[str] = set()

    async def decided(self, decided: Decided) -> None:
        """Take note of it, within a few seconds however ill the disk is; telling goes on behind. Never raises."""
        try:
            couriers = await self._all()
            await asyncio.gather(*(courier.put(decided) for courier in couriers))
            for courier in couriers:
                self._send_out(courier)
        except Exception:
            log.exception("failure %s: not everybody will be told", decided.key)

    async def close(self, timeout_s: float = 5.0) -> None:
        """Finish what is being told, `timeout_s` at most; the rest stays in the spool. Never raises."""
        couriers = await self._all() if self._couriers else []
        for courier in couriers:
            self._send_out(courier)  # whoever was away has had time to come back
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while self._rounds and clock() < deadline:  # one that ends may be followed by another
            await asyncio.wait(self._rounds.values(), timeout=deadline - clock())
        for round_ in list(self._rounds.values()):
            round_.cancel()
            await asyncio.gather(round_, return_exceptions=True)
        for courier in couriers:
            await courier.close()

    async def flush(self) -> list[Flushed]:
        """Tell all that still waits, and say what became of it."""
        return [await courier.empty() for courier in await self._all()]

    def _send_out(self, courier: Courier) -> None:
        """One round at a time; what comes during one that is about to end gets a round of its own."""
        name = courier.receiver.name
        if name in self._rounds:
            self._missed.add(name)
            return
        self._missed.discard(name)
        self._rounds[name] = asyncio.create_task(courier.empty(), name=f"telling {name}")
        self._rounds[name].add_done_callback(lambda round_: self._round_over(courier, round_))

    def _round_over(self, courier: Courier, round_: asyncio.Task[Flushed]) -> None:
        name = courier.receiver.name
        del self._rounds[name]
        if name in self._missed and not round_.cancelled() and round_.result().problem is None:
            self._send_out(courier)

    async def _all(self) -> list[Courier]:
        """Made when first needed, since it takes a look at the job's folder."""
        self._couriers = self._couriers or asyncio.create_task(self._made())
        return await asyncio.shield(self._couriers)

    async def _made(self) -> list[Courier]:
        try:
            info = await bounded(JobFolder(self._folder).read_info)
        except (OSError, UsageError) as error:
            log.warning("%s: its job.json cannot be read (%s)", self._folder, error)
            info = None
        return [
            Courier(
                receiver,
                Spool(self._folder / "spool" / receiver.name, self._clock),
                patience=self._patience,
                clock=self._clock,
            )
            for receiver in self._receivers(info)
        ]

    def _receivers(self, info: JobInfo | None) -> Sequence[Slack | Dataflow | Suspicion]:
        plan, clock, patience = self._plan, self._clock, self._patience
        name, cluster = (info.name, cluster_of(info, plan.ledger)) if info else ("", None)
        found: list[Slack | Dataflow | Suspicion] = []
        if cluster is not None:
            found.append(Suspicion(plan.ledger, cluster=cluster, clock=clock))
        if plan.dataflow is not None:
            found.append(Dataflow(plan.dataflow, name=name, cluster=cluster, patience=patience, clock=clock))
        if plan.slack is not None:
            found.append(Slack(plan.slack, self._folder, name=name, patience=patience, clock=clock))
        return found


async def flush(
    plan: AttributionSpec, folder: Path, *, clock: Clock | None = None, patience: Patience | None = None
) -> list[Flushed]:
    """Tell all that a job has left in its spool: one entry for each receiver that the plan names. Never raises."""
    afterwards = Afterwards(plan, folder, clock=clock, patience=patience)
    try:
        return await afterwards.flush()
    finally:
        await afterwards.close(0.0)
