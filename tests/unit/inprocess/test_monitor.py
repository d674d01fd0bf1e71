"""Monitors of real processes, on a real store: what happens when the rank, its monitor or the store fails."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from nvrx_slurm.inprocess import barriers
from nvrx_slurm.inprocess.attribution import Interruption
from nvrx_slurm.inprocess.barriers import MemberProcess, NewPlace, pack
from nvrx_slurm.inprocess.ledger import Completed, Interrupted, IterationOpened, Log, Lost, Sealed
from nvrx_slurm.inprocess.monitor import IGNORED_SIGNALS
from nvrx_slurm.util.processes import is_alive
from tests.inprocess.servers import Valkey
from tests.unit.inprocess.monitored import ROOT, Group
from tests.unit.inprocess.monitored_rank import INHERITABLE
from tests.waiting import until

Watch = Callable[..., Group]
APART = [{"host": "n0"}, {"host": "n1"}, {"host": "n2"}]
"""Ranks of different hosts: they know each other by heartbeats only."""


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    """A server for all tests that do not disturb it."""
    server = Valkey(tmp_path_factory.mktemp("valkey"))
    yield server
    server.end()


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[Valkey]:
    """A server that the test kills."""
    server = Valkey(tmp_path / "valkey")
    yield server
    server.end()


@pytest.fixture
def watch(valkey: Valkey, tmp_path: Path) -> Iterator[Watch]:
    """Starts ranks with monitors; no process of them is left after the test."""
    groups: list[Group] = []

    def start(
        members: int = 1,
        *,
        on: Valkey = valkey,
        each: list[dict[str, Any]] | None = None,
        lives: bool = True,
        **options: Any,
    ) -> Group:
        """`lives`: the ranks run until the test ends them."""
        group = Group(on, tmp_path.name, members, tmp_path, each, **options)
        groups.append(group)
        if lives:
            group.until_watched()
        return group

    yield start
    for group in groups:
        group.close()


def run_from_the_start(group: Group) -> None:
    """All members have arrived with their ranks, and the function is called, as in a real group."""
    group.wrote(Sealed(iteration=0, world_size=group.members))
    for member in range(group.members):
        place = NewPlace(
            rank=member + 10,
            world_size=group.members,
            active_rank=member,
            active_world_size=group.members,
            process=MemberProcess(host="", pid=0, began=0),
        )
        group.connection.arrive(barriers.start(0), member, pack(place))
    group.wrote(IterationOpened(iteration=0))


# ---- the rank dies


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ("os._exit(3)", "ended with exit code 3 and had not left the call"),
        ("threading.Thread(target=os._exit, args=(0,)).start()", "exit code 0 and had not left"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
        ("signal.raise_signal(signal.SIGSEGV)", "was ended by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 2)", f"was ended by signal {signal.SIGRTMIN + 2}"),
    ],
)
def test_dead_rank_is_recorded_with_how_it_ended(watch: Watch, ends: str, words: str):
    """However a process ends without leaving the call, its loss is recorded, and the monitor ends too."""
    group = watch()
    group.ranks[0].starts(ends)
    lost = group.lost(0)
    assert (lost.interruption, lost.rank, lost.host) == (Interruption.TERMINATED, 0, "here")
    assert words in lost.text
    group.until_dead(group.ranks[0].monitor)


def test_rank_that_dies_before_its_monitor_is_ready_is_recorded(watch: Watch):
    """The other ranks already wait for it."""
    group = watch(ends_early=True, lives=False)
    assert group.ranks[0].ended() == 1
    assert group.lost(0).interruption is Interruption.TERMINATED


def test_rank_that_becomes_another_program_is_out(watch: Watch):
    """Its pid lives on with a program that is no rank: it is killed before it is recorded."""
    group = watch()
    group.ranks[0].starts("os.execv('/bin/sleep', ['sleep', '1000'])")
    assert "another program" in group.lost(0).text
    assert not is_alive(group.ranks[0].process.pid)


def test_death_after_completion_is_known_in_the_next_call(watch: Watch):
    """The other ranks would wait for it there."""
    group = watch()
    run_from_the_start(group)
    group.wrote(Completed(iteration=0))
    group.ranks[0].kill()
    with closing(group.store.connect(group.name, 1)) as connection:
        until(lambda: connection.read(0, 1.0), "an entry in the log of the next call")
        following = Log(connection, 1)
        following.refresh()
    assert following.ledger.lost[0].inherited
    assert group.lost(0).interruption is Interruption.TERMINATED


def test_children_of_the_rank_have_no_part_in_it(watch: Watch):
    """A forked child neither hides the rank's death, nor hides the monitor's death from the rank, nor is killed with
    it."""
    group = watch()
    [rank] = group.ranks
    child = rank.does("forked()")
    try:
        os.kill(rank.monitor, signal.SIGKILL)
        assert rank.ended() == -signal.SIGKILL
        assert is_alive(child)
    finally:
        os.kill(child, signal.SIGKILL)


# ---- the monitor dies, or fails


@pytest.mark.parametrize("stopped", [False, True])
def test_rank_dies_with_its_monitor(watch: Watch, stopped: bool):
    """The kernel kills it, even if it is stopped; its sibling on the same host records the loss at once."""
    group = watch(2)
    run_from_the_start(group)
    rank, sibling = group.ranks
    until(lambda: targets(sibling.monitor).count("anon_inode:[pidfd]") == 2, "the sibling watches this process too")
    if stopped:
        rank.kill(signal.SIGSTOP)
    os.kill(rank.monitor, signal.SIGKILL)
    assert rank.ended() == -signal.SIGKILL
    lost = group.lost(0)
    assert (lost.interruption, lost.rank) == (Interruption.TERMINATED, 10)
    assert "seen by member 1" in lost.text


def targets(pid: int) -> list[str]:
    found = []
    for place in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            found.append(str(place.readlink()))
    return found


def test_monitor_that_fails_takes_its_rank_along(watch: Watch):
    """An error in the monitor or in a store leaves no rank without a monitor."""
    group = watch(store="flawed", lives=False)
    assert group.ranks[0].ended() == -signal.SIGKILL
    lost = group.lost(0)
    assert lost.interruption is Interruption.MONITOR_PROCESS_EXCEPTION
    assert "StopIteration" in lost.text
    until(lambda: "the monitor has failed" in group.ranks[0].errors, "the monitor's message")


def test_rank_that_the_group_has_given_up_is_killed(watch: Watch):
    """The other ranks go on without it, so it must not go on."""
    group = watch(heartbeat_timeout_s=5.0)
    group.wrote(Lost(iteration=0, member=0, interruption=Interruption.UNRESPONSIVE, text="no sign of life"))
    assert group.ranks[0].ended() == -signal.SIGKILL
    group.until_dead(group.ranks[0].monitor)


# ---- silence


def test_soft_timeout_is_recorded_once(watch: Watch):
    """The group restarts; the next soft timeout can be recorded only in a later iteration, with the rank's number
    there."""
    group = watch(soft_timeout_s=0.1)
    run_from_the_start(group)
    group.ranks[0].does("stamps.resume()")
    (first,) = until(lambda: group.ledger.causes, "the soft timeout")
    assert isinstance(first, Interrupted)
    assert (first.interruption, first.iteration, first.rank) == (Interruption.SOFT_TIMEOUT, 0, 0)
    group.wrote(Sealed(iteration=1, world_size=1))
    group.ranks[0].does("[monitor.iteration(1, 7), stamps.begin_iteration()]")
    *_, second = until(lambda: group.ledger.iteration == 2 and group.ledger.causes, "another soft timeout")
    assert isinstance(second, Interrupted)
    assert (second.iteration, second.rank) == (1, 7)
    assert group.ledger.length == 5


@pytest.mark.parametrize("hindrance", ["signal.SIGSTOP", "None"])
def test_hard_timeout_ends_the_rank(watch: Watch, hindrance: str):
    """SIGTERM ends a rank that does not ignore it, even if it is stopped."""
    group = watch(soft_timeout_s=0.1, hard_timeout_s=0.2, grace_s=60.0)
    if hindrance != "None":
        group.ranks[0].starts(f"[stamps.resume(), os.kill(os.getpid(), {hindrance})]")
    else:
        group.ranks[0].starts("stamps.resume()")
    assert group.ranks[0].ended() == -signal.SIGTERM
    lost = group.lost(0)
    assert lost.interruption is Interruption.HARD_TIMEOUT
    assert "hard timeout" in lost.text
    assert "SIGTERM, SIGCONT" in group.ranks[0].errors


def test_hard_timeout_kills_a_rank_that_ignores_sigterm(watch: Watch):
    """It is killed after the grace time."""
    group = watch(soft_timeout_s=0.1, hard_timeout_s=0.2, grace_s=0.1)
    group.ranks[0].starts("[signal.signal(signal.SIGTERM, signal.SIG_IGN), stamps.resume()]")
    assert group.ranks[0].ended() == -signal.SIGKILL
    assert group.lost(0).interruption is Interruption.HARD_TIMEOUT


# ---- the lease, and the sibling


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_silent_member_is_recorded_once_it_is_dead(watch: Watch, number: signal.Signals):
    """If a host freezes or fails, no sibling records a loss before both processes are dead."""
    group = watch(2, each=APART, heartbeat_timeout_s=8.0)
    run_from_the_start(group)
    rank = group.ranks[0]
    for pid in (rank.monitor, rank.process.pid):
        os.kill(pid, number)
    lost = group.lost(0)
    assert not is_alive(rank.process.pid) and not is_alive(rank.monitor)
    assert (lost.interruption, lost.rank, lost.host) == (Interruption.UNRESPONSIVE, 10, "n0")
    assert list(group.ledger.lost) == [0]


def test_the_next_one_is_watched_when_a_sibling_is_lost(watch: Watch):
    """Two hosts that fail at once are both recorded."""
    group = watch(3, each=APART, heartbeat_timeout_s=8.0)
    run_from_the_start(group)
    for rank in group.ranks[1:]:
        for pid in (rank.monitor, rank.process.pid):
            os.kill(pid, signal.SIGKILL)
    assert {group.lost(member).interruption for member in (1, 2)} == {Interruption.UNRESPONSIVE}
    assert is_alive(group.ranks[0].process.pid)


def test_no_rank_outlives_a_store_that_is_gone(watch: Watch, own_valkey: Valkey):
    """A rank is killed when its lease ends without an answer: the ranks that reach the store rely on that."""
    group = watch(2, on=own_valkey, heartbeat_timeout_s=8.0)
    own_valkey.kill()
    for rank in group.ranks:
        assert rank.ended() == -signal.SIGKILL
        group.until_dead(rank.monitor)
        assert "no heartbeat has reached the store" in rank.errors


def test_store_that_comes_back_costs_no_rank(watch: Watch, own_valkey: Valkey):
    """No member is judged by the old heartbeats in the store; deaths are recorded as before."""
    group = watch(3, on=own_valkey, each=APART, heartbeat_timeout_s=20.0)
    run_from_the_start(group)
    own_valkey.kill()
    own_valkey.start()
    before = [group.connection.beat(0, member) for member in range(3)]
    for member in range(3):
        until(lambda member=member: group.connection.beat(0, member) > before[member] + 3, "more heartbeats")
    assert group.ledger.lost == {}
    group.ranks[2].kill()
    assert group.lost(2).interruption is Interruption.TERMINATED


def test_death_while_the_store_is_away_is_recorded_later(watch: Watch, own_valkey: Valkey):
    """It is recorded as soon as the store is back."""
    group = watch(on=own_valkey, heartbeat_timeout_s=20.0)
    own_valkey.kill()
    group.ranks[0].kill()
    group.ranks[0].ended()
    own_valkey.start()
    assert group.lost(0).interruption is Interruption.TERMINATED


# ---- suspended


def announce_suspension(group: Group) -> None:
    """Slurm signals two seconds before SIGSTOP: each monitor suspends its lease."""
    for rank in group.ranks:
        os.kill(rank.monitor, signal.SIGTSTP)
        until(lambda rank=rank: "no lease ends until they continue" in rank.errors, "its lease to be suspended")


def test_no_rank_outlives_a_store_that_is_gone_after_a_suspension(watch: Watch, own_valkey: Valkey):
    """The end of the suspension cannot be recorded, but the lease starts again, once, and ends."""
    group = watch(2, on=own_valkey, heartbeat_timeout_s=20.0)
    announce_suspension(group)
    own_valkey.send(signal.SIGSTOP)  # each call waits for an answer
    for rank in group.ranks:
        assert rank.process.wait(timeout=60.0) == -signal.SIGKILL


def test_death_during_a_suspension_is_recorded_once_the_store_answers(watch: Watch, own_valkey: Valkey):
    """While the lease is suspended, waiting for the store is still bounded, and not skipped."""
    group = watch(on=own_valkey, heartbeat_timeout_s=20.0)
    announce_suspension(group)
    own_valkey.kill()
    group.ranks[0].kill()
    group.ranks[0].ended()
    own_valkey.start()
    assert group.lost(0).interruption is Interruption.TERMINATED


# ---- terminated, and left


def termination(grace_s: float) -> str:
    lost = "Lost(iteration=0, member=0, interruption=Interruption.UNHEALTHY, rank=0, text='no GPU')"
    return f"monitor.terminate_within({lost}, {grace_s})"


def test_rank_to_be_terminated_is_killed_after_the_grace(watch: Watch):
    """Its loss is recorded only when it is dead, with the reason that was given."""
    group = watch()
    group.ranks[0].does(termination(0.2))
    lost = group.lost(0)
    assert not is_alive(group.ranks[0].process.pid)
    assert (lost.interruption, lost.text) == (Interruption.UNHEALTHY, "no GPU")


def test_rank_to_be_terminated_may_end_by_itself(watch: Watch):
    """The group does not wait for the rest of its grace."""
    group = watch()
    group.ranks[0].does(termination(1000.0))
    assert is_alive(group.ranks[0].process.pid)
    group.ranks[0].process.stdin.close()  # type: ignore[union-attr]
    assert group.ranks[0].ended() == 0
    assert group.lost(0).interruption is Interruption.UNHEALTHY
    assert "ResourceWarning" not in group.ranks[0].errors


def test_what_a_rank_said_before_it_died_counts(watch: Watch):
    """Its monitor reads the rank's last message and its death at the same time."""
    group = watch()
    os.kill(group.ranks[0].monitor, signal.SIGSTOP)
    group.ranks[0].does(termination(1000.0))
    group.ranks[0].process.stdin.close()  # type: ignore[union-attr]
    assert group.ranks[0].ended() == 0
    os.kill(group.ranks[0].monitor, signal.SIGCONT)
    assert group.lost(0).interruption is Interruption.UNHEALTHY


@pytest.mark.parametrize("stopped", [False, True])
def test_leaving_leaves_no_process_and_no_descriptor(watch: Watch, stopped: bool):
    """No process and no descriptor is left, and no signal arrives later, however often it is called; also if the
    monitor is stopped, or a forked child still has the descriptors."""
    group = watch()
    [rank] = group.ranks
    child = rank.does("forked()")
    try:
        if stopped:
            os.kill(rank.monitor, signal.SIGSTOP)
        rank.does("[monitor.leave(), monitor.leave()]")
        assert not Path(f"/proc/{rank.monitor}").exists()
        assert rank.does("descriptors()") == rank.does("before")
    finally:
        os.kill(child, signal.SIGKILL)
    assert rank.does("'it lives'") == "it lives"
    assert group.ledger.length == 0


def test_forked_child_cannot_leave_for_its_parent(watch: Watch):
    """The child may unwind the same stack; the parent is still watched."""
    group = watch()
    [rank] = group.ranks
    rank.does("os.waitpid(child, 0) if (child := os.fork()) else [monitor.leave(), os._exit(0)]")
    assert is_alive(rank.monitor)
    rank.kill()
    assert group.lost(0).interruption is Interruption.TERMINATED


# ---- what a monitor is


def test_signals_to_the_step_are_not_for_monitors(watch: Watch):
    """Slurm sends them to all processes of a step; the monitor lives as long as its rank."""
    group = watch()
    [rank] = group.ranks
    for number in IGNORED_SIGNALS:
        os.kill(rank.monitor, number)
    assert os.getsid(rank.monitor) == rank.monitor
    assert rank.does("1 + 1") == 2
    rank.kill()
    assert "SIGKILL" in group.lost(0).text


def pipes_of(pid: int) -> int:
    return sum(name.startswith("pipe:") for name in targets(pid))


def test_monitor_inherits_only_what_it_needs(watch: Watch):
    """It has neither the rank's own descriptors nor the pipes by which its parent waits for its end."""
    [rank] = watch().ranks
    assert INHERITABLE in rank.does("list(before.values())")
    held = targets(rank.monitor)
    assert INHERITABLE not in held
    assert {name for name in held if "memfd" in name} == {"/memfd:nvrx-stamps (deleted)"}
    until(lambda: pipes_of(rank.monitor) == 1, "only its own pipe, by which the rank knows that it lives")
    assert Path(f"/proc/{rank.monitor}/cwd").readlink() == ROOT  # relative paths of a store count from here


def test_log_file_has_all_and_standard_error_the_warnings(watch: Watch, tmp_path: Path):
    """The file belongs to one rank, and only its owner can read it."""
    group = watch(2, logfile=str(tmp_path / "rank-{rank}.log"))
    group.ranks[1].kill()
    group.lost(1)
    group.until_dead(group.ranks[1].monitor)
    path = tmp_path / "rank-1.log"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "watches process" in path.read_text() and "was ended by SIGKILL" in path.read_text()
    assert group.ranks[1].errors == ""
