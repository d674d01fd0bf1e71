"""The fold: a job's view after one more entry of its journal. No I/O, no clock.

    view = new_view(plan)
    for entry in entries:
        view = fold(view, entry)

It reads the journal only, and decides nothing: where the core's rules can be seen in the records, it goes by them.
"""

from __future__ import annotations

from nvrx_slurm.records import Beat, Entry, Plan
from nvrx_slurm.report import decisions, facts
from nvrx_slurm.report.changes import tell_step
from nvrx_slurm.report.model import JobView

__all__ = ["JobView", "fold", "new_view", "with_beat"]

_HANDLERS = {**facts.HANDLERS, **decisions.HANDLERS}


def new_view(plan: Plan | None = None) -> JobView:
    """A job of which nothing has happened yet. With its plan, the view also tells whom the first rounds wait for."""
    if plan is None:
        return JobView()
    return JobView(plan=plan, name=plan.name, restarts_left=plan.fault_tolerance.max_restarts)


def fold(view: JobView, entry: Entry) -> JobView:
    """The view after `entry`. One that was folded in before (by its number) changes nothing."""
    if entry.n <= view.n:
        return view
    view.n, view.t = entry.n, entry.t
    _HANDLERS[type(entry.record)](view, entry.record, entry.t)
    return view


def with_beat(view: JobView, beat: Beat) -> JobView:
    """The view with the steps of a beat; one of an older generation, cycle or agent changes nothing."""
    node = view.nodes.get(beat.node)
    current = view.replicas.get(beat.replica or "")
    if node is None or current is None or not beat.steps or node.state != "active":
        return view
    fresh = node.incarnation in ("", beat.incarnation) and beat.generation == view.generation
    if fresh and beat.cycle == current.cycle and node.replica == beat.replica:
        tell_step(view, node.name, max(beat.steps.values()))
    return view
