"""The fold: a job's view after one more entry of its journal. No I/O, no clock.

    view = new_view(plan)
    for entry in entries:
        view = fold(view, entry)

It reads the journal only, and decides nothing: where the core's rules can be seen in the records, it goes by them.
"""

from __future__ import annotations

from nvrx_slurm.journal.records import Entry, Plan
from nvrx_slurm.report import decisions, facts
from nvrx_slurm.report.changes import tell_step
from nvrx_slurm.report.model import Heard, JobView
from nvrx_slurm.report.ranks import is_current

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


def with_beat(view: JobView, heard: Heard) -> JobView:
    """The view with a beat. One of an older agent changes nothing; one of an older cycle tells no step."""
    beat = heard.beat
    node = view.nodes.get(beat.node)
    if node is None or node.incarnation not in ("", beat.incarnation) or beat.generation != view.generation:
        return view
    view.heard[beat.node] = heard
    if beat.steps and is_current(view, node, beat):
        tell_step(view, node.name, max(beat.steps.values()))
    return view
