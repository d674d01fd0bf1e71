"""The faults that hit the job as a whole: its spares, its control plane, its time."""

from __future__ import annotations

from collections.abc import Callable

from nvrx_slurm.errors import EXIT_TERMINATED, EXIT_TIMEOUT
from nvrx_slurm.lab.flow.language.writing import NOTE, Item
from nvrx_slurm.lab.flow.matrix.case import Case, LeftOut
from nvrx_slurm.lab.flow.matrix.shape import Shape
from nvrx_slurm.lab.flow.recording.inference import HELD_BACK
from nvrx_slurm.util.durations import words

SETTLED_S = 3.0


def starts(job: Shape) -> Case:
    """No fault: what all others rely on."""
    return Case("starts", "Every replica comes together and runs.", (), tuple(job.begins_to_work()), 10.0)


def _spare_killed(job: Shape) -> Case | LeftOut:
    if not job.plan.spares:
        return LeftOut("spare-killed", "the job has no spares")
    faults = (
        {"when": job.at_work(), "do": {"kill_node": {"spare": 1}}, "as": "$dead"},
        {"when": {"event": "node_lost", "after": words(SETTLED_S)}, "do": {"scancel": {}}},
    )
    unmoved: Item = {"never": {"restart_decided": {}}}
    expect = (*job.begins(), unmoved, {"node_lost": {"node": "$dead"}}, *job.ends(EXIT_TERMINATED))
    about = "A hot spare dies, and nobody else notices."
    return Case("spare-killed", about, faults, expect, job.fenced_s)


def _then_a_worker(job: Shape, name: str, about: str, action: str, *seen: Item) -> Case:
    """Part of the control plane dies and the workers go on; that all is well again shows in the next recovery."""
    faults: list[Item] = [
        {"when": job.at_work(), "do": {action: {}}},
        {NOTE: "By then it is up again.", "when": _settled(seen), "do": {"kill_worker": job.worker(0)}},
    ]
    unmoved: Item = {"never": {"restart_decided": {}}, "until": {"worker_failed": {}}}
    expect = (*job.begins(), unmoved, *seen, *job.after_failure())
    return Case(name, about, tuple(faults), expect, job.restart_s + 30.0)


def _settled(seen: tuple[Item, ...]) -> Item:
    for event, fields in (pair for item in seen for pair in item.items()):
        return {"event": event, **fields, "after": words(SETTLED_S)}
    return {"fault": 1, "after": words(SETTLED_S)}


def _kill_controller(job: Shape) -> Case:
    about = "The controller is killed: no worker is touched, and the next one goes on."
    return _then_a_worker(job, "kill-controller", about, "kill_controller", {"controller_started": {"epoch": ">= 2"}})


def _kill_store(job: Shape) -> Case | LeftOut:
    if job.plan.store_url is not None:
        return LeftOut("kill-store", f"the store at {job.plan.store_url} is the site's own")
    return _then_a_worker(job, "kill-store", "The store is killed: nothing recorded is lost.", "kill_store")


def _lose_batch_host(job: Shape) -> Case:
    """Its survivors stop once they have been without controller for too long, and Slurm requeues the job."""
    bounds = {"fault_tolerance.control_plane_grace": words(job.bounds.fence_timeout_s)}
    faults = (
        {"when": job.at_work(), "do": {"kill_node": {"batch_host": True}}, "as": "$dead"},
        {
            NOTE: HELD_BACK,
            "when": {"fault": 1, "after": words(job.bounds.fence_timeout_s + 10.0)},
            "do": {"release": {}},
        },
    )
    again = map(_of_next_generation, job.begins())
    expect = (*job.begins(), {"job_started": {"generation": 1}}, *again)
    needs = {"on": ["dev"], "cluster": {"nodes": job.plan.total_nodes + 1}}
    about = "The batch host's node dies: the job's next generation goes on."
    return Case("lose-batch-host", about, faults, expect, job.bounds.fence_timeout_s + 120.0, bounds, needs)


def _requeue(job: Shape) -> Case:
    faults = (
        {"when": job.at_work(), "do": {"requeue": {}}},
        {NOTE: HELD_BACK, "when": {"event": "job_ended"}, "do": {"release": {}}},
    )
    again = map(_of_next_generation, job.begins())
    ended = {"job_ended": {"exit_code": EXIT_TERMINATED}}
    expect = (*job.begins(), ended, {"job_started": {"generation": 1}}, *again)
    return Case("requeue", "The job is requeued, and its next generation runs.", faults, expect, job.restart_s + 90.0)


def _of_next_generation(item: Item) -> Item:
    """The same rounds, of generation 1."""
    if "any_order" in item:
        return {"any_order": [_of_next_generation(branch) for branch in item["any_order"]]}
    return {"round_closed": {**item["round_closed"], "generation": 1}}


def _cancel(job: Shape) -> Case:
    faults = ({"when": job.at_work(), "do": {"scancel": {}}},)
    expect = (*job.begins(), {"shutdown": {"exit_code": EXIT_TERMINATED}}, *job.ends(EXIT_TERMINATED))
    return Case("cancel", "The job is cancelled, and leaves nothing behind.", faults, expect, job.restart_s)


def _time_limit(job: Shape) -> Case:
    faults = ({"when": job.at_work(), "do": {"shorten_time_limit": "now"}},)
    expect = (*job.begins(), {"shutdown": {"exit_code": EXIT_TIMEOUT}}, *job.ends(EXIT_TIMEOUT))
    takes_s = job.restart_s + job.bounds.checkpoint_timeout_s + 60.0
    return Case("time-limit", "The job's time is up.", faults, expect, takes_s)


OF_THE_JOB: tuple[Callable[[Shape], Case | LeftOut], ...] = (
    _spare_killed,
    _kill_controller,
    _kill_store,
    _cancel,
    _time_limit,
    _requeue,
    _lose_batch_host,
)
