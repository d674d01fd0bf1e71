"""What must hold of a whole run, judged at its end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nvrx_slurm.controller.controller import replay
from nvrx_slurm.core.state import new_job
from nvrx_slurm.errors import EXIT_NO_RESTART
from nvrx_slurm.jobspec.model import FaultToleranceSpec
from nvrx_slurm.journal.records import AttributionJudged, RendezvousOpened, RestartDecided
from nvrx_slurm.lab.simulation.adversary import KINDS
from nvrx_slurm.lab.simulation.promises import Promise

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.run import SimulationRun

RESTARTS_AN_ACT = 2
"""An act costs a restart, and one more where it lasts: what is left of it strikes the next cycle."""

LONGEST_OUTAGE = 0.5
"""Of the time that workers go on without a control plane: so much of it, at most, must touch none of them."""


def verdicts(run: SimulationRun) -> Iterator[tuple[Promise, str]]:
    """The promises that this run has broken as a whole, each in one sentence."""
    yield from ((Promise.REPLAY, sentence) for sentence in _replays(run))
    yield from ((Promise.SHUTDOWN, sentence) for sentence in _ends_as_decided(run))
    yield from ((Promise.LEAVING, sentence) for sentence in _never_left(run))
    if _must_finish(run) and run.exit_code not in (0, *_stopped(run)):
        yield (
            Promise.FINISH,
            f"nodes enough were healthy, and the job ended with {run.exit_code}: {_reason(run)}",
        )
    if _only_the_control_plane_failed(run):
        yield from ((Promise.UNTOUCHED, sentence) for sentence in _nothing_was_touched(run))


def left_behind(run: SimulationRun) -> Iterator[str]:
    """Who should have left, and has not, at the moment in which the job script ends."""
    for node in run.nodes.values():
        if not node.is_well:
            continue
        if node.agent is not None and node.agent.alive:
            yield f"the job has ended, and the agent of {node.name} is still there"
        for worker in node.workers():
            yield f"the job has ended, and {worker} still lives"


def _never_left(run: SimulationRun) -> Iterator[str]:
    """Who did not say that it leaves, and might have."""
    ended = run.promises.ended
    for name in ended.missing if ended is not None else ():
        if run.nodes[name].is_well:
            yield f"the job has ended, and {name} had not said that it leaves"


def _replays(run: SimulationRun) -> Iterator[str]:
    for entry, decided in replay(new_job(run.plan), run.promises.journal)[:1]:
        yield f"journal entry {entry.n} is {entry.record}, and its replay decides {decided}"


def _ends_as_decided(run: SimulationRun) -> Iterator[str]:
    shutdown = run.promises.shutdown
    if run.batch.gave_up or run.exit_code is None:
        return
    if shutdown is None:
        yield f"the job ended with {run.exit_code}, and no shutdown is in the journal"
    elif run.exit_code != shutdown.exit_code:
        yield f"the job ended with {run.exit_code}, and was shut down with {shutdown.exit_code}"


def _must_finish(run: SimulationRun) -> bool:
    """Whether what went wrong leaves nodes and budget enough. Rather no than a yes that asks too much."""
    acts, plan = run.acts, run.plan
    bounds = plan.fault_tolerance
    if any(KINDS[act.kind].fatal for act in acts) or not all(
        role.on_failure.startswith("restart") for role in plan.roles
    ):
        return False
    on_nodes = [act for act in acts if KINDS[act.kind].node]
    if (
        len({act.node for act in on_nodes}) > plan.spares
        or RESTARTS_AN_ACT * len(on_nodes) > bounds.max_restarts.count
    ):
        return False
    return _outage_s(run) < LONGEST_OUTAGE * _outage_limit_s(bounds)


def _stopped(run: SimulationRun) -> tuple[int, ...]:
    """The exit codes of a job that was asked to stop."""
    judged = (entry.record for entry in run.promises.journal if isinstance(entry.record, AttributionJudged))
    return (EXIT_NO_RESTART,) if any(each.acted for each in judged) else ()


def _outage_limit_s(bounds: FaultToleranceSpec) -> float:
    """What may touch workers soonest: their lease; their agents' patience; or, since their ends are reported through
    the store, the bound for how far apart these may be."""
    skew_s = bounds.hang.exit_skew
    return min(bounds.fence_timeout, bounds.control_plane_grace, math.inf if skew_s is None else skew_s)


def _outage_s(run: SimulationRun) -> float:
    """For how long the controller could not decide, at most: outages may follow one another."""
    kinds = [(KINDS[act.kind], act) for act in run.acts]
    killed = sum(act.kind.startswith("kill_controller") or act.kind == "kill_at_commit" for act in run.acts)
    return sum(act.lasts_s for kind, act in kinds if kind.outage) + killed * 1.5


def _only_the_control_plane_failed(run: SimulationRun) -> bool:
    bounds = run.plan.fault_tolerance
    if any(KINDS[act.kind].node or KINDS[act.kind].fatal for act in run.acts):
        return False
    return _outage_s(run) < LONGEST_OUTAGE * _outage_limit_s(bounds)


def _nothing_was_touched(run: SimulationRun) -> Iterator[str]:
    for entry in run.promises.journal:
        record = entry.record
        if isinstance(record, RestartDecided) or (isinstance(record, RendezvousOpened) and record.cycle > 0):
            yield f"only the control plane failed, and workers were stopped: {record}"
            return


def _reason(run: SimulationRun) -> str:
    shutdown = run.promises.shutdown
    return shutdown.reason if shutdown is not None else "no shutdown was decided"
