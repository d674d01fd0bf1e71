"""A program that cannot be executed: whether it is tried again, and when the job ends."""

from __future__ import annotations

from typing import Any

import pytest

from nvrx_slurm.errors import EXIT_NO_RESTART
from nvrx_slurm.journal.records import RendezvousClosed, RendezvousOpened, RestartDecided, Shutdown, WorkerFailed
from tests.unit.core.fleet import Fleet, plain


def kinds(decisions: Any) -> list[type]:
    return [type(decision) for decision in decisions]


def cannot_run(fleet: Fleet, node: str, error: str = "No such file or directory: /no/prog") -> Any:
    cycle = fleet.job.replicas["main-0"].cycle
    return fleet.tell(WorkerFailed(**fleet.by(node), replica="main-0", cycle=cycle, rank=0, error=error))


def joined(*, spares: int, suspects: tuple[str, ...] = ()) -> Fleet:
    """Two nodes whose cycle 0 has been assigned; no worker runs yet."""
    fleet = Fleet(plain(nodes=2, spares=spares, max_restarts=3), suspects=suspects)
    fleet.join(*fleet.names)
    return fleet


@pytest.mark.parametrize(
    "error", ["No such file or directory: /no/prog", "container.image: /no/root does not exist on this node"]
)
def test_a_program_that_cannot_be_executed_is_not_restarted(error: str) -> None:
    """The same nodes would fail again: the job ends at once, with the exit code for that."""
    decided, shutdown = cannot_run(joined(spares=0), "n2", error)
    assert (decided.action, decided.restarts_left) == ("stop", 3)
    why = f"main-0: a restart cannot help: its program cannot be executed; last: {decided.cause}"
    assert shutdown == Shutdown(exit_code=EXIT_NO_RESTART, reason=why)


def test_no_spare_under_suspicion_is_tried() -> None:
    """A suspect gets ranks only if no other node is left: what it would show is in doubt."""
    assert kinds(cannot_run(joined(spares=1, suspects=("n3",)), "n2")) == [RestartDecided, Shutdown]
    assert kinds(cannot_run(joined(spares=2, suspects=("n3",)), "n2")) == [RestartDecided, RendezvousOpened]


def test_a_spare_is_tried_once_where_a_node_cannot_execute_it() -> None:
    """The node may lack a mount that others have. If a second node fails in the same way, the job ends."""
    fleet = joined(spares=2)
    assert kinds(cannot_run(fleet, "n2")) == [RestartDecided, RendezvousOpened]
    fleet.ready("n1", "n2", cycle=1)
    assert set(fleet.said(RendezvousClosed)[-1].nodes) == {"n1", "n3"}
    assert kinds(cannot_run(fleet, "n1")) == [RestartDecided, Shutdown]


@pytest.mark.parametrize("how", [{"exit_code": 1}, {"signal": 9}])
def test_a_worker_that_ran_and_names_a_missing_file_spends_the_budget(how: dict[str, int]) -> None:
    """Its program was executed: the message is about another file."""
    fleet = joined(spares=0)
    error = "No such file or directory: /data"
    failed = WorkerFailed(**fleet.by("n2"), replica="main-0", cycle=0, rank=0, error=error, **how)
    assert kinds(fleet.tell(failed)) == [RestartDecided, RendezvousOpened]


def test_a_wrong_option_of_the_wrapper_is_not_tried_again() -> None:
    """No spare is tried: the option is wrong on any node. A user's own exception of that name counts as any other."""
    error = "OptionError: Wrapper: soft_timeout must be shorter than hard_timeout"
    for name, ends in (("nvrx_slurm.inprocess.exception.", True), ("", False)):
        fleet = joined(spares=2)
        failed = WorkerFailed(**fleet.by("n2"), replica="main-0", cycle=0, rank=0, error=name + error, exit_code=1)
        decided, follows = fleet.tell(failed)
        assert (decided.action, isinstance(follows, Shutdown)) == ("stop" if ends else "restart_replica", ends)
    assert fleet.job.shutdown is None


@pytest.mark.parametrize("error", ["No such file or directory: /x", "Cannot allocate memory: /x"])
def test_what_has_run_before_or_may_run_again_spends_the_budget(error: str) -> None:
    """A file system may be back in a moment, and memory may be free again."""
    fleet = joined(spares=0)
    if error.startswith("No such"):
        fleet.started("n1")
    assert kinds(cannot_run(fleet, "n2", error)) == [RestartDecided, RendezvousOpened]
