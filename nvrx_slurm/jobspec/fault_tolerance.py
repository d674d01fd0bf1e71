"""The keys below `fault_tolerance`: their types, defaults, and how they must relate."""

from __future__ import annotations

from typing import Self

from pydantic import ConfigDict, Field, model_validator

from nvrx_slurm.jobspec.attribution import AttributionSpec
from nvrx_slurm.jobspec.block import Block
from nvrx_slurm.jobspec.progress import Progress
from nvrx_slurm.jobspec.values import (
    CountOrRate,
    Duration,
    Factor,
    Misfit,
    Pause,
    Positive,
    SignalName,
    Size,
    Switch,
)
from nvrx_slurm.journal.records import Allowance
from nvrx_slurm.util.durations import words

FOLLOWS: dict[tuple[str, ...], tuple[str, tuple[tuple[str, ...], ...]]] = {
    ("heartbeat", "startup_timeout"): ("shorter", (("heartbeat", "timeout"),)),
    ("fence_timeout",): ("shorter", (("heartbeat", "timeout"),)),
    ("control_plane_grace",): ("shorter", (("fence_timeout",),)),
    ("attribution", "decision_timeout"): ("longer", (("attribution", "timeout"), ("rendezvous", "join_timeout"))),
}
"""key → what it is not, when nobody sets it, than any of these keys."""


class Heartbeat(Block):
    """Signs of life between agents and controller."""

    interval: Duration = 1.0
    """How often an agent says that it lives."""
    timeout: Duration = 15.0
    """How long a silent node is waited for. A death is noticed at once, by its broken connection."""
    startup_timeout: Duration = 60.0
    """The same for the first beat after a node has registered; before that nobody is given up. Not set: at least
    `timeout`."""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        self.settle("startup_timeout", max(self.startup_timeout, self.timeout))
        if self.interval >= self.timeout:
            raise _unfit("must be shorter than heartbeat.timeout", self.timeout, self.interval, "interval")
        if self.startup_timeout < self.timeout:
            raise _unfit("must be at least heartbeat.timeout", self.timeout, self.startup_timeout, "startup_timeout")
        return self


class Rendezvous(Block):
    """How a round of nodes comes together."""

    join_timeout: Duration = 600.0
    """How long a round may stay open. Then the job goes on with `min_nodes`, or ends with 75."""
    last_call: Pause = 5.0
    """How long a late node of the cycle before is still preferred to a hot spare that is there."""


class Teardown(Block):
    """How workers are stopped."""

    grace: Pause = 10.0
    """From the first signal to SIGKILL, for all that a worker has started: the whole budget. When the job is
    cancelled or preempted, at most Slurm's KillWait less 8 s (half of it, if that is more)."""
    stop_signal: SignalName = "SIGTERM"
    """The first signal."""
    checkpoint_signal: SignalName | None = None
    """Sent to workers ahead of the time limit, so that they save what they can."""
    checkpoint_timeout: Duration = 60.0
    """How long they get for that."""
    gpu_memory_below: Size | None = None
    """Before workers start again, wait until each GPU of the node uses less than this."""
    gpu_reclaim_timeout: Duration = 50.0
    """How long that may take; then workers start all the same."""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.checkpoint_signal == self.stop_signal:
            raise Misfit(
                f"must differ from teardown.stop_signal ({self.stop_signal}): workers could not tell them apart",
                "checkpoint_signal",
            )
        return self

    @property
    def checkpoint_s(self) -> float:
        """How long workers get to save ahead of the time limit; 0 where nobody asks them to."""
        return self.checkpoint_timeout if self.checkpoint_signal else 0.0


class Hang(Block):
    """When a worker that lives counts as hung: it is stopped, with its stacks on file. Nothing counts unless set."""

    startup_timeout: Duration | None = None
    """From a worker's start to its first `workload.beat()`."""
    step_timeout: Duration | None = None
    """Between two signs of progress, outside of sections, which have deadlines of their own."""
    no_output: Duration | None = None
    """Without a line of output; needs no change to the workers' code."""
    exit_skew: Duration | None = None
    """How long others may go on once one rank has ended with exit code 0."""
    learn: Switch = False
    """Where no bound is set, take one from the run: the longest seen times `safety_factor`."""
    safety_factor: Factor = 5.0
    """How much longer than the longest seen something may take."""
    warmup: Positive = 50
    """How many must have been seen before that counts."""


class Backoff(Block):
    """How a crash loop is slowed down: cycles in a row in which a worker fails soon after the start, without a new
    step. A lost node does not count. With `backoff: off` every restart is immediate."""

    model_config = ConfigDict(json_schema_extra={"type": ["object", "string", "integer", "boolean"]})

    after: Positive = 3
    """From so many on the next cycle waits."""
    within: Duration = 60.0
    """A cycle that lasted longer ends the row."""
    initial: Duration = 1.0
    """The first pause, counted from the failure. Each one after it is twice as long."""
    max: Pause = 60.0
    """The longest pause; `0` turns the back-off off."""

    @model_validator(mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        return {"max": 0} if value is False or str(value).lower() in ("0", "off", "false") else value


class FaultToleranceSpec(Block):
    """Budgets and bounds."""

    max_restarts: CountOrRate = Field(default_factory=lambda: Allowance(count=3), json_schema_extra={"default": 3})
    """How many worker failures each replica is restarted after, in all or within some time. Lost nodes are not
    counted: they cost spares."""
    max_job_restarts: CountOrRate | None = None
    """The same for all replicas together. Not set: no limit."""
    max_node_losses: CountOrRate | None = None
    """After how many lost nodes the job goes on. Not set: for as long as it has spares."""
    max_preemptions: CountOrRate | None = None
    """After how many preemptions the job goes on. Not set: no limit."""
    quarantine_after: Positive = 3
    """A node that was lost this often gets no ranks any more."""
    control_plane_grace: Duration = 600.0
    """How long workers go on without controller and store. Then they are stopped, and Slurm is asked to requeue. Not
    set: at least `fence_timeout`."""
    fence_timeout: Duration = 30.0
    """A node that has lost both store and controller kills its workers after this; only then do their ranks run
    elsewhere, unless its death is proven. Not set: at least `heartbeat.timeout`."""
    heartbeat: Heartbeat = Heartbeat()
    rendezvous: Rendezvous = Rendezvous()
    teardown: Teardown = Teardown()
    hang: Hang = Hang()
    backoff: Backoff = Backoff()
    progress: Progress = Progress()
    attribution: AttributionSpec = AttributionSpec()

    @model_validator(mode="after")
    def _relations(self) -> Self:
        is_fence_set = "fence_timeout" in self.model_fields_set
        silence_s = self.heartbeat.timeout
        self.settle("fence_timeout", max(self.fence_timeout, silence_s))
        self.settle("control_plane_grace", max(self.control_plane_grace, self.fence_timeout))
        fence_s, grace_s = self.fence_timeout, self.control_plane_grace
        if fence_s < silence_s:
            raise _unfit("must be at least heartbeat.timeout", silence_s, fence_s, "fence_timeout")
        # A shorter grace does no harm: workers are dead by then. But whoever sets both has something else in mind.
        if is_fence_set and fence_s > grace_s:
            raise _unfit("must be at most control_plane_grace", grace_s, fence_s, "fence_timeout")
        self._check_hang()
        self._bound_decision()
        return self

    def _check_hang(self) -> None:
        """Signs of progress travel with the beats: a bound that is shorter would see none."""
        interval = self.heartbeat.interval
        for key in ("startup_timeout", "step_timeout", "no_output", "exit_skew"):
            bound = getattr(self.hang, key)
            if bound is not None and bound <= interval:
                raise _unfit("must be longer than heartbeat.interval", interval, bound, "hang", key)

    def _bound_decision(self) -> None:
        """A round waits for sources while it waits for nodes, and for none that has given up by then."""
        asked = self.attribution
        bounds = {"attribution.timeout": asked.timeout, "rendezvous.join_timeout": self.rendezvous.join_timeout}
        key, most_s = min(bounds.items(), key=lambda bound: bound[1])
        if asked.decision_timeout <= most_s:
            return
        if "decision_timeout" in asked.model_fields_set:
            raise _unfit(f"must be at most {key}", most_s, asked.decision_timeout, "attribution", "decision_timeout")
        self.settle("attribution", asked.model_copy())  # not the default that all jobs share
        self.attribution.settle("decision_timeout", most_s)


def _unfit(rule: str, other_s: float, seen_s: float, *path: str) -> Misfit:
    return Misfit(f"{rule} ({words(other_s)}), not {words(seen_s)}", *path)
