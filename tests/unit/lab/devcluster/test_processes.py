"""The process table, on invented tables and on real processes of this machine."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from nvrx_slurm.errors import WaitTimeout
from nvrx_slurm.lab.devcluster.lifecycle import free_ports
from nvrx_slurm.lab.devcluster.processes import (
    Process,
    Table,
    children_first,
    descendants,
    environment_of,
    freeze,
    identify,
    kill,
    lives,
    parse_stat,
    read_table,
    send,
    wait_until,
)
from nvrx_slurm.util.clock import SystemClock
from tests.still_clock import StillClock

# Prints its child's pid, then both wait until the test ends them.
_FAMILY = (
    "import subprocess, sys; c = subprocess.Popen(['cat'], stdin=subprocess.PIPE); print(c.pid, flush=True); c.wait()"
)


def table(*parents: tuple[int, int]) -> Table:
    """A table of live processes from (pid, parent) pairs."""
    return {pid: Process(pid=pid, parent=parent, state="S", started=1, program="x") for pid, parent in parents}


@pytest.fixture
def family() -> Iterator[set[int]]:
    """A real parent and its child; both are killed after the test, even if they are stopped."""
    with subprocess.Popen([sys.executable, "-c", _FAMILY], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        yield {parent.pid, child}
        now = read_table()
        send((now[pid] for pid in (child, parent.pid) if pid in now), signal.SIGKILL)


def test_descendants_reach_every_generation() -> None:
    """Children, grandchildren and the roots themselves are found; other processes are not."""
    assert descendants(table((1, 0), (2, 1), (3, 2), (9, 0)), [1]) == {1, 2, 3}


def test_children_come_before_their_parents() -> None:
    """In the order of killing, no parent dies before its children."""
    assert children_first([10, 11, 12, 13], table((10, 1), (12, 10), (11, 12), (13, 11))) == [13, 11, 12, 10]


def test_descendants_stop_at_the_barrier() -> None:
    """Neither the barrier nor its descendants belong to the roots."""
    assert descendants(table((1, 0), (2, 1), (3, 2), (4, 1)), [1], barrier=[2]) == {1, 4}


def test_descendants_of_a_dead_root_are_none() -> None:
    """A pid that is not in the table has no descendants."""
    assert descendants(table((2, 1)), [1]) == set()


def test_a_program_name_with_parentheses_does_not_confuse_the_reader() -> None:
    """The kernel does not escape the name; the fields begin after its last parenthesis."""
    fields = " ".join(str(number) for number in range(6, 60))
    process = parse_stat(f"7 (a) b (c) S 3 4 {fields}")
    assert (process.pid, process.parent, process.program, process.state) == (7, 3, "a) b (c", "S")


def test_a_process_is_not_taken_for_another_one_with_its_pid(family: set[int]) -> None:
    """Pid and start time together identify a process: a reused pid is another process."""
    identity = identify(min(family))
    assert identity is not None
    assert lives(identity)
    other = type(identity)(pid=identity.pid, started=identity.started - 1, boot=identity.boot)
    assert not lives(other)


def test_a_signal_reaches_no_process_that_began_later(family: set[int]) -> None:
    """A record of an ended process, whose pid was reused, sends no signal."""
    identity = identify(min(family))
    assert identity is not None
    send([msgspec.structs.replace(identity, started=identity.started - 1)], signal.SIGKILL)
    assert family <= read_table().keys()
    send([identity], signal.SIGKILL)
    wait_until(lambda: not lives(identity), timeout_s=10, what="the signal", clock=SystemClock())


def test_freeze_stops_all_and_kill_leaves_none(family: set[int]) -> None:
    """After `freeze` all are stopped; after `kill` none is alive, apart from zombies."""
    clock = SystemClock()

    def members(now: Table) -> set[int]:
        return family & now.keys()

    assert freeze(members, clock) == family
    assert {read_table()[pid].state for pid in family} == {"T"}
    assert kill(members, clock) == family
    assert not family & read_table().keys()


def test_freeze_catches_what_is_forked_meanwhile(family: set[int]) -> None:
    """A process that appears between two looks is stopped too."""
    parent, child = sorted(family)
    looks = iter([{parent}, {parent, child}, {parent, child}])
    assert freeze(lambda _: next(looks), SystemClock()) == family


def test_the_environment_of_a_process_is_what_it_was_started_with() -> None:
    """A value may have an equals sign."""
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, env={"A": "b=c"}) as process:
        wait_until(
            lambda: environment_of(process.pid) == {"A": "b=c"}, timeout_s=10, what="exec", clock=SystemClock()
        )
        process.kill()


def test_free_ports_are_different_and_avoid_the_taken_ones() -> None:
    """No port is given twice, and none that was excluded or has a listener."""
    first = free_ports(20)
    with socket.socket() as listener:
        listener.bind(("", first[0]))
        listener.listen()
        second = free_ports(200, taken=first[1:])
    assert len(set(second)) == 200
    assert not set(second) & set(first)


def test_waiting_ends_at_its_bound_and_says_what_for() -> None:
    """It ends at its bound, and the message names the awaited condition."""
    clock = StillClock(0.0)
    with pytest.raises(WaitTimeout, match="the sun"):
        wait_until(lambda: False, timeout_s=5, what="the sun", clock=clock)
    assert 5 <= clock.now < 5.2
