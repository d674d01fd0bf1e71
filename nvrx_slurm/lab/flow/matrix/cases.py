"""The faults of the matrix, each a case: those that may hit any role, then those that hit the job as a whole."""

from __future__ import annotations

from collections.abc import Callable

from nvrx_slurm.errors import EXIT_TERMINATED, EXIT_TIMEOUT
from nvrx_slurm.lab.flow.language.writing import NOTE, Item, in_any_order
from nvrx_slurm.lab.flow.matrix.shape import LeftOut, MatrixCase, RoleShape
from nvrx_slurm.lab.flow.recording.inference import HELD_BACK
from nvrx_slurm.util.durations import words

MOST_IN_A_ROW = 6
"""Faults that are worth waiting for, one after the other's recovery."""

_NO_HANG = "no bound says when a worker hangs: set fault_tolerance.hang.step_timeout, or no_output"


def _case(role: RoleShape, fault: str, about: str, faults: list[Item], *expect: Item, takes_s: float) -> MatrixCase:
    return MatrixCase(role.name(fault), about, tuple(faults), (*role.begins(), *expect), takes_s)


def _kill_first_rank(role: RoleShape) -> MatrixCase:
    faults = [{"when": role.at_work(), "do": {"kill_worker": role.worker(0)}}]
    expect = (*role.others_unmoved(), *role.after_failure())
    return _case(role, "kill-first-rank", "Rank 0 is killed.", faults, *expect, takes_s=role.restart_s)


def _kill_last_rank(role: RoleShape) -> MatrixCase | LeftOut:
    if role.last_rank == 0:
        return LeftOut(role.name("kill-last-rank"), "its only rank is the first")
    faults = [{"when": role.at_work(), "do": {"kill_worker": role.worker(role.last_rank)}}]
    expect = (*role.others_unmoved(), *role.after_failure())
    return _case(role, "kill-last-rank", "The last rank is killed.", faults, *expect, takes_s=role.restart_s)


def _kill_agent(role: RoleShape) -> MatrixCase:
    faults = [{"when": role.at_work(), "do": {"kill_agent": role.last_node}, "as": "$dead"}]
    expect = (*role.others_unmoved(), *role.after_loss("$dead"))
    about = "The agent of a node is killed; its workers die with it."
    return _case(role, "kill-agent", about, faults, *expect, takes_s=role.fenced_s)


def _kill_node(role: RoleShape) -> MatrixCase | LeftOut:
    if not role.can_lose(1):
        return LeftOut(role.name("kill-node"), "its only node is the batch host")
    faults = [{"when": role.at_work(), "do": {"kill_node": role.last_node}, "as": "$dead"}]
    expect = (*role.others_unmoved(), *role.after_loss("$dead"))
    return _case(role, "kill-node", "A node dies at once.", faults, *expect, takes_s=role.fenced_s)


def _freeze_node(role: RoleShape) -> MatrixCase | LeftOut:
    if not role.can_lose(1):
        return LeftOut(role.name("freeze-node"), "its only node is the batch host")
    faults = [{"when": role.at_work(), "do": {"stop_node": role.last_node}, "as": "$frozen"}]
    expect = (*role.others_unmoved(), *role.after_loss("$frozen"))
    return _case(role, "freeze-node", "A node freezes.", faults, *expect, takes_s=role.fenced_s)


def _hang(role: RoleShape) -> MatrixCase | LeftOut:
    hang = role.bounds.hang
    given = [bound for bound in (hang.step_timeout, hang.no_output) if bound is not None]
    if not given:
        return LeftOut(role.name("hang"), _NO_HANG)
    # Before its first heartbeat a worker has no step to be late with.
    moment = role.at_work() if hang.no_output is not None else {"event": "progress", **role.whose}
    faults: list[Item] = [{"when": moment, "do": {"stop_worker": role.worker(role.last_rank)}}]
    hung = {"worker_hung": {**role.whose, "cycle": 0}}
    expect = (*role.others_unmoved(), hung, *role.after_failure())
    about = "A worker is stopped: it hangs, and is found out."
    return _case(role, "hang", about, faults, *expect, takes_s=max(given) + role.restart_s + 30.0)


def _budget(role: RoleShape) -> MatrixCase | LeftOut:
    most, name = role.bounds.max_restarts.count, role.name("budget")
    if not role.restarts:
        return LeftOut(name, f"its role does not restart: on_failure is {role.role.on_failure}")
    if not 0 < most < MOST_IN_A_ROW:
        return LeftOut(name, f"max_restarts is {most}; tried where it is from 1 to {MOST_IN_A_ROW - 1}")
    moments = [role.at_work(), *(role.recovered_at(cycle) for cycle in range(1, most + 1))]
    faults = [{"when": moment, "do": {"kill_worker": role.worker(0)}} for moment in moments]
    expect = [item for cycle in range(most + 1) for item in role.after_failure(cycle)]
    about = "Workers are killed until the restart budget is spent."
    return _case(role, "budget", about, faults, *expect, takes_s=(most + 1) * role.restart_s)


def _no_spare_left(role: RoleShape) -> MatrixCase | LeftOut:
    deaths, name = role.plan.spares + 1, role.name("no-spare-left")
    if not role.restarts:
        return LeftOut(name, f"its role does not restart: on_failure is {role.role.on_failure}")
    if deaths > MOST_IN_A_ROW:
        return LeftOut(name, f"{deaths} nodes would have to die, one after the other; at most {MOST_IN_A_ROW} do")
    if not role.can_lose(1):
        return LeftOut(name, "its only node is the batch host")
    if deaths == 1:
        return LeftOut(name, "there are no spares: kill-node is the same")
    moments = [role.at_work(), *(role.recovered_at(cycle) for cycle in range(1, deaths))]
    faults: list[Item] = [
        {"when": moment, "do": {"kill_node": role.last_node}, "as": f"$dead{number}"}
        for number, moment in enumerate(moments, start=1)
    ]
    expect = [item for n in range(deaths) for item in role.after_loss(f"$dead{n + 1}", n, n + 1)]
    about = "Node after node dies, until no spare is left."
    return _case(role, "no-spare-left", about, faults, *expect, takes_s=deaths * role.fenced_s)


def _two_at_once(role: RoleShape) -> MatrixCase | LeftOut:
    name = role.name("two-at-once")
    if role.plan.spares < 2:
        return LeftOut(name, f"needs 2 spares, and the job has {role.plan.spares}")
    if not role.can_lose(2) or not role.restarts:
        return LeftOut(name, "needs two nodes in a replica that restarts, the batch host not among them")
    faults: list[Item] = [
        {"when": role.at_work(), "do": {"kill_node": role.node_before_last()}, "as": "$dead1"},
        {"when": {"fault": 1}, "do": {"kill_node": role.last_node}, "as": "$dead2"},
    ]
    lost = in_any_order([[{"node_lost": {"node": "$dead1"}}], [{"node_lost": {"node": "$dead2"}}]])
    # Whether the second death falls into the first recovery is a matter of milliseconds: one cycle, or two.
    recovered = {"recovered": {**role.whose, "cycle": ">= 1"}}
    expect = (*role.others_unmoved(), *lost, recovered)
    return _case(role, "two-at-once", "Two nodes die together.", faults, *expect, takes_s=2 * role.fenced_s)


OF_A_ROLE: tuple[Callable[[RoleShape], MatrixCase | LeftOut], ...] = (
    _kill_first_rank,
    _kill_last_rank,
    _kill_agent,
    _kill_node,
    _freeze_node,
    _hang,
    _two_at_once,
    _no_spare_left,
    _budget,
)


SETTLED_S = 3.0


def starts(job: RoleShape) -> MatrixCase:
    """No fault: what all others rely on."""
    return MatrixCase("starts", "Every replica comes together and runs.", (), tuple(job.begins_to_work()), 10.0)


def _spare_killed(job: RoleShape) -> MatrixCase | LeftOut:
    if not job.plan.spares:
        return LeftOut("spare-killed", "the job has no spares")
    faults = (
        {"when": job.at_work(), "do": {"kill_node": {"spare": 1}}, "as": "$dead"},
        {"when": {"event": "node_lost", "after": words(SETTLED_S)}, "do": {"scancel": {}}},
    )
    unmoved: Item = {"never": {"restart_decided": {}}}
    expect = (*job.begins(), unmoved, {"node_lost": {"node": "$dead"}}, *job.ends(EXIT_TERMINATED))
    about = "A hot spare dies, and no worker is touched."
    return MatrixCase("spare-killed", about, faults, expect, job.fenced_s)


def _then_a_worker(job: RoleShape, name: str, about: str, action: str, *seen: Item) -> MatrixCase:
    """Part of the control plane dies and the workers go on; that all is well again shows in the next recovery."""
    faults: list[Item] = [
        {"when": job.at_work(), "do": {action: {}}},
        {NOTE: "By then it is up again.", "when": _settled(seen), "do": {"kill_worker": job.worker(0)}},
    ]
    unmoved: Item = {"never": {"restart_decided": {}}, "until": {"worker_failed": {}}}
    expect = (*job.begins(), unmoved, *seen, *job.after_failure())
    return MatrixCase(name, about, tuple(faults), expect, job.restart_s + 30.0)


def _settled(seen: tuple[Item, ...]) -> Item:
    for event, fields in (pair for item in seen for pair in item.items()):
        return {"event": event, **fields, "after": words(SETTLED_S)}
    return {"fault": 1, "after": words(SETTLED_S)}


def _kill_controller(job: RoleShape) -> MatrixCase:
    about = "The controller is killed: no worker is touched, and the next one goes on."
    return _then_a_worker(job, "kill-controller", about, "kill_controller", {"controller_started": {"epoch": ">= 2"}})


def _kill_store(job: RoleShape) -> MatrixCase | LeftOut:
    if job.plan.store.url is not None:
        return LeftOut("kill-store", f"the store at {job.plan.store.url} is the site's own")
    return _then_a_worker(job, "kill-store", "The store is killed: nothing recorded is lost.", "kill_store")


def _lose_batch_host(job: RoleShape) -> MatrixCase:
    """Its survivors stop once they have been without controller for too long, and Slurm requeues the job."""
    bounds = {"fault_tolerance.control_plane_grace": words(job.bounds.fence_timeout)}
    faults = (
        {"when": job.at_work(), "do": {"kill_node": {"batch_host": True}}, "as": "$dead"},
        {
            NOTE: HELD_BACK,
            "when": {"fault": 1, "after": words(job.bounds.fence_timeout + 10.0)},
            "do": {"release": {}},
        },
    )
    again = map(_of_next_generation, job.begins())
    expect = (*job.begins(), {"job_started": {"generation": 1}}, *again)
    needs = {"on": ["dev"], "cluster": {"nodes": job.plan.total_nodes + 1}}
    about = "The batch host's node dies: the job's next generation goes on."
    return MatrixCase("lose-batch-host", about, faults, expect, job.bounds.fence_timeout + 120.0, bounds, needs)


def _requeue(job: RoleShape) -> MatrixCase:
    faults = (
        {"when": job.at_work(), "do": {"requeue": {}}},
        {NOTE: HELD_BACK, "when": {"event": "job_ended"}, "do": {"release": {}}},
    )
    again = map(_of_next_generation, job.begins())
    ended = {"job_ended": {"exit_code": EXIT_TERMINATED}}
    expect = (*job.begins(), ended, {"job_started": {"generation": 1}}, *again)
    return MatrixCase(
        "requeue", "The job is requeued, and its next generation runs.", faults, expect, job.restart_s + 90.0
    )


def _of_next_generation(item: Item) -> Item:
    """The same rounds, of generation 1."""
    if "any_order" in item:
        return {"any_order": [_of_next_generation(branch) for branch in item["any_order"]]}
    return {"round_closed": {**item["round_closed"], "generation": 1}}


def _cancel(job: RoleShape) -> MatrixCase:
    faults = ({"when": job.at_work(), "do": {"scancel": {}}},)
    expect = (*job.begins(), {"shutdown": {"exit_code": EXIT_TERMINATED}}, *job.ends(EXIT_TERMINATED))
    return MatrixCase("cancel", "The job is cancelled, and leaves nothing behind.", faults, expect, job.restart_s)


def _time_limit(job: RoleShape) -> MatrixCase:
    faults = ({"when": job.at_work(), "do": {"shorten_time_limit": "now"}},)
    expect = (*job.begins(), {"shutdown": {"exit_code": EXIT_TIMEOUT}}, *job.ends(EXIT_TIMEOUT))
    takes_s = job.restart_s + job.bounds.teardown.checkpoint_timeout + 60.0
    return MatrixCase("time-limit", "The job's time is up.", faults, expect, takes_s)


OF_THE_JOB: tuple[Callable[[RoleShape], MatrixCase | LeftOut], ...] = (
    _spare_killed,
    _kill_controller,
    _kill_store,
    _cancel,
    _time_limit,
    _requeue,
    _lose_batch_host,
)
