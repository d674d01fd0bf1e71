"""What the attribution broker is asked about a failure, and when it receives what followed.

The core names the sources and reads the answers (`core.restart_decision`). This module collects the journal's facts
about the failed cycle, so that a controller that takes over sends the same request as the one before.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from nvrx_slurm.controller.attribution_broker import AttributionBroker
from nvrx_slurm.core.state import ControlState, NodeState, Phase, RestartDecision
from nvrx_slurm.journal.records import (
    AttributionAsked,
    AttributionJudged,
    JobStarted,
    LogFindings,
    Record,
    RendezvousClosed,
    RestartDecided,
    WorkerFailed,
    WorkersStarted,
)
from nvrx_slurm.journal.verdicts import MOST_FINDINGS_BYTES, AgentFindings, Failed, FailureKey, Inquiry, VerdictRecord
from nvrx_slurm.util.files import JobFiles

# How many cycles before the one that failed are shown, too.
EARLIER = 3

_Cycle = tuple[str, int]
_CycleRecord = (
    RendezvousClosed | WorkersStarted | WorkerFailed | AttributionAsked | AttributionJudged | RestartDecided
)


class _Known(msgspec.Struct):
    """What the journal holds about one cycle."""

    started_at: float = 0.0
    pids: dict[int, int] = {}
    failed: dict[int, WorkerFailed] = {}
    judged: AttributionJudged | None = None
    decided: RestartDecided | None = None
    settled: bool = False
    reported: bool = False  # to the broker: what followed from its failure


class AttributionRequests:
    """Follows the journal; writes to the broker after each commit."""

    def __init__(self, job: ControlState, files: JobFiles, broker: AttributionBroker) -> None:
        self._job, self._files, self._broker = job, files, broker
        self._known: dict[_Cycle, _Known] = {}
        self._to_ask: list[_Cycle] = []

    def note(self, record: Record, t: float) -> None:
        """One record of the journal, in its order."""
        match record:
            case JobStarted():
                self._known, self._to_ask = {}, []
            case RendezvousClosed():
                self._cycle(record).started_at = t
                # Forget old cycles. A job that fails fast is cycles ahead of slow sources, so a cycle is kept until
                # the broker has learned what followed from its failure.
                old = [key for key in self._known if key[0] == record.replica and key[1] < record.cycle - EARLIER]
                for key in old:
                    pending = self._job.restart_decisions.get(key)
                    if self._known[key].reported or pending is None or not pending.sources:
                        del self._known[key]
            case WorkersStarted():
                self._cycle(record).pids.update(record.pids)
            case WorkerFailed():
                self._cycle(record).failed[record.rank] = record
            case AttributionAsked():
                self._cycle(record)
                self._to_ask.append((record.replica, record.cycle))
            case AttributionJudged():
                self._cycle(record).judged = record
            case RestartDecided():
                self._cycle(record).decided = record

    def replayed(self, entries: Iterable[tuple[Record, float]]) -> None:
        """Take in the journal of earlier controllers: the broker is asked again what is still open."""
        for record, t in entries:
            self.note(record, t)
        # Most of these requests are answered. Which are not, the core's own decisions say.
        self._to_ask = []
        for key, pending in self._job.restart_decisions.items():
            known = self._known.setdefault(key, _Known())
            known.reported = pending.judged
            if pending.asked and pending.sources and not pending.judged:
                self._to_ask.append(key)

    def go_on(self) -> None:
        """Send the broker what is new. Called after a commit: all that the broker reads is in the journal by then."""
        asked, self._to_ask = self._to_ask, []
        for key in asked:
            pending = self._job.restart_decisions.get(key)
            if pending is not None:
                self._known[key].settled = self._is_settled(pending)
                self._broker.ask(self.inquiry(pending), settled=self._known[key].settled)
        for key, pending in self._job.restart_decisions.items():
            known = self._known.get(key)
            if not pending.sources or known is None or known.reported:
                continue
            if not known.settled and self._is_settled(pending):
                known.settled = True
                self._broker.settled(self._key(pending))
            if (judged := known.judged) is not None:
                known.reported = True
                self._broker.judged(
                    VerdictRecord(
                        key=self._key(pending),
                        verdict=judged.verdict,
                        acted=judged.acted,
                        why=judged.why,
                        action="stop" if known.decided is None else known.decided.action,
                        nodes_blamed=judged.blamed,
                        dry_run=self._job.plan.fault_tolerance.attribution.dry_run,
                    )
                )

    def found(self, found: LogFindings) -> None:
        """Pass on what the node's present agent has found about a failure that the sources know."""
        # Of a node that was given up, or has joined again since, nothing counts: its logs are read from the folder.
        node = self._job.nodes.get(found.node)
        pending = self._job.restart_decisions.get((found.replica, found.cycle))
        if node is None or not node.alive or found.incarnation != node.incarnation:
            return
        if pending is None or not pending.sources or found.generation != self._job.generation:
            return
        if found.node in pending.members and len(found.data) <= MOST_FINDINGS_BYTES:
            folder = self._files.cycle_logs(found.replica, found.generation, found.cycle)
            self._broker.found(AgentFindings(folder=str(folder), node=found.node, whole=found.whole, data=found.data))

    def inquiry(self, pending: RestartDecision) -> Inquiry:
        """The failure with all that the journal holds about it so far."""
        known, failure = self._known.get((pending.replica, pending.cycle), _Known()), pending.failure
        reported = known.failed.get(failure.rank) if failure.rank is not None else None
        folders = [
            str(self._files.cycle_logs(pending.replica, self._job.generation, cycle))
            for cycle in range(pending.cycle, max(-1, pending.cycle - EARLIER - 1), -1)
        ]
        return Inquiry(
            key=self._key(pending),
            paths=tuple(folders[:1]),
            failed=Failed(
                cause=failure.cause,
                node=failure.node,
                rank=failure.rank,
                exit_code=reported.exit_code if reported else None,
                signal=reported.signal if reported else None,
                error=reported.error if reported else None,
                hung=failure.hung,
                step=failure.step,
                t=failure.noticed,
            ),
            nodes=pending.members,
            workers_per_node=self._job.replicas[pending.replica].role.workers_per_node,
            pids=known.pids,
            started_at=known.started_at,
            earlier=tuple(folders[1:]),
        )

    def _is_settled(self, pending: RestartDecision) -> bool:
        """Whether the workers of the cycle that failed are gone, as far as that can be waited for."""
        replica = self._job.replicas[pending.replica]
        if replica.cycle == pending.cycle:  # no next cycle has been called
            nodes = [self._job.nodes[name] for name in pending.members]
            return not any(node.state is NodeState.ACTIVE and node.replica == replica.id for node in nodes)
        return replica.cycle > pending.cycle and not (replica.phase is Phase.RENDEZVOUS and replica.awaited)

    def _cycle(self, record: _CycleRecord) -> _Known:
        return self._known.setdefault((record.replica, record.cycle), _Known())

    def _key(self, pending: RestartDecision) -> FailureKey:
        return FailureKey(
            job=str(self._files.path),
            generation=self._job.generation,
            replica=pending.replica,
            cycle=pending.cycle,
            rank=pending.failure.rank,
        )
