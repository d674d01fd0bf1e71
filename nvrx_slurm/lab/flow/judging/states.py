"""The state of a job as triggers name it, from its journal alone. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from nvrx_slurm.journal.records import (
    AnyRecord,
    JobEnded,
    JobStarted,
    ReplicaEnded,
    RoundClosed,
    RoundOpened,
    Shutdown,
    WorkersStarted,
)
from nvrx_slurm.lab.flow.language.when import JobStateName


@dataclass(slots=True)
class _Replica:
    """`missing`: the nodes of the closed round whose workers do not run yet; None: the round is open."""

    cycle: int
    missing: set[str] | None = None


@dataclass(slots=True)
class JobStates:
    """Takes in a journal. None: none of the states that have a name, such as cycle 0 coming together."""

    state: JobStateName | None = None
    _replicas: dict[str, _Replica] = field(default_factory=dict)

    def feed(self, record: AnyRecord) -> JobStateName | None:
        """The state after this record, the journal's next."""
        if isinstance(record, JobStarted):
            self._replicas, self.state = {}, None
        elif isinstance(record, Shutdown):
            self.state = "shutting_down"
        elif isinstance(record, JobEnded):
            self.state = "ended"
        elif self._moved(record) and self.state not in ("shutting_down", "ended"):
            self.state = self._of_replicas()
        return self.state

    def _moved(self, record: AnyRecord) -> bool:
        if isinstance(record, RoundOpened):
            self._replicas[record.replica] = _Replica(record.cycle)
        elif isinstance(record, RoundClosed):
            self._replicas[record.replica] = _Replica(record.cycle, set(record.nodes))
        elif isinstance(record, ReplicaEnded):
            self._replicas.pop(record.replica, None)
        elif isinstance(record, WorkersStarted):
            self._started(record)
        else:
            return False
        return True

    def _started(self, record: WorkersStarted) -> None:
        replica = self._replicas.get(record.replica)
        if replica is not None and replica.cycle == record.cycle and replica.missing is not None:
            replica.missing.discard(record.node)

    def _of_replicas(self) -> JobStateName | None:
        """Recovering: a round after cycle 0 is open. Running: every replica that has not ended runs in full."""
        replicas = self._replicas.values()
        if any(replica.missing is None and replica.cycle > 0 for replica in replicas):
            return "recovering"
        return "running" if replicas and all(replica.missing == set() for replica in replicas) else None
