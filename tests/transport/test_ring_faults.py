"""A ring whose processes are killed, stopped and interrupted: no wrong bytes, no stuck slot, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from nvrx_slurm.transport import ring_locks
from nvrx_slurm.transport.errors import RingError
from nvrx_slurm.transport.ring import Claim, SharedRing, is_gone, sweep
from nvrx_slurm.transport.slots import Refusal, State
from nvrx_slurm.util.processes import is_alive
from tests.waiting import until

T = TypeVar("T")

WAIT_S = 30.0
ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts helpers, by module and arguments, and kills them after the test."""
    begun: list[subprocess.Popen[str]] = []

    def start(module: str, *arguments: object, stderr: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", f"tests.transport.{module}", *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
        begun.append(subprocess.Popen(command, cwd=ROOT, text=True, **pipes))  # type: ignore[call-overload]
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.timeout(400)  # it needs much processor time, and is slow on a busy machine
@pytest.mark.parametrize(
    ("what", "stride"),
    [("die", 7), ("raise", 3), ("inherit", 11), ("use", 5)],
    ids=["die", "raise", "inherit", "use"],
)
def test_between_any_two_bytecodes(start: Start, what: str, stride: int) -> None:
    """After a death, a handler's exception, or a use of the ring by a handler, a step has either not begun or is
    complete; no lock is left, and each payload is counted once."""
    helper = start("ring_bytecodes", what, stride)
    said, _ = helper.communicate(timeout=390)
    assert helper.returncode == 0
    assert all(places > 100 for places in json.loads(said).values())


@pytest.mark.parametrize("seed", range(3))
def test_processes_that_are_killed_and_stopped(start: Start, seed: int) -> None:
    """Writers and readers are killed or stopped every few milliseconds: no reader gets wrong bytes, all slots are
    usable afterwards, and the counts match what the processes did."""
    dice = random.Random(seed)
    with SharedRing.create(4, 64 << 10, lease_s=0.02, overwrite=seed % 2 == 0) as ring:
        roles = ["writer", "writer", "reader", "reader", "peeker"]
        seeds = iter(range(seed * 1000, seed * 1000 + 1000))
        actors = [(role, start("ring_actor", ring.name, role, next(seeds))) for role in roles]
        ended: list[subprocess.Popen[str]] = []
        for _, actor in actors:
            assert actor.stdout is not None and actor.stdout.readline() == "begun\n"
        for _ in range(40):
            number = dice.randrange(len(actors))
            role, actor = actors[number]
            before = ring.metrics()
            if dice.random() < 0.2:
                actor.send_signal(signal.SIGKILL)
                actor.wait(WAIT_S)
                ended.append(actor)
                actors[number] = (role, start("ring_actor", ring.name, role, next(seeds)))
            else:
                actor.send_signal(signal.SIGSTOP)
                others_go_on(ring, before.published + before.consumed + before.dropped)
                actor.send_signal(signal.SIGCONT)
        lines = [line for actor in [*(actor for _, actor in actors), *ended] for line in told_by(actor)]
        assert all(actor.wait(WAIT_S) == 0 for _, actor in actors)
        assert set(lines) <= {"begun", "published", "consumed"}
        ready = ring.get_ready_count()
        metrics = ring.metrics()
        assert metrics.states[State.WRITING] == metrics.states[State.READING] == 0
        assert metrics.published == metrics.consumed + metrics.dropped + ready
        for what, counted in (("published", metrics.published), ("consumed", metrics.consumed)):
            told = lines.count(what)
            assert told <= counted <= told + len(ended)  # a killed process may not have reported its last action
    assert not (SHM / ring.name).exists()


def told_by(actor: subprocess.Popen[str]) -> list[str]:
    """Order the process to end, if it still runs, and return all that it has reported."""
    assert actor.stdin is not None and actor.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        actor.stdin.write("end\n")
        actor.stdin.flush()
    return actor.stdout.read().splitlines()


def others_go_on(ring: SharedRing, done: int) -> None:
    """Wait until the other processes have done a few things more, or for twice the lease, since a full ring may block
    them."""
    deadline = time.monotonic() + 2 * ring.lease_s

    def moved() -> bool:
        metrics = ring.metrics()
        return metrics.published + metrics.consumed + metrics.dropped > done + 5 or time.monotonic() > deadline

    until(moved, "a step of another process")


def test_a_stopped_process_in_the_middle_of_a_step(start: Start) -> None:
    """Its slot is BUSY after a bounded wait, writers use other slots, and the states can be read. Once continued, the
    process completes its step."""
    with SharedRing.create(2, 64, overwrite=False) as ring:
        ref = ring.write_raw(b"in slot 0")
        frozen = start("ring_frozen", ring.name)
        until(lambda: is_stopped(frozen.pid), "the stop")
        begun = time.monotonic()
        assert ring.claim(0) is Refusal.BUSY
        assert ring.try_read() is None
        assert ring.write_raw(b"elsewhere").slot == 1
        assert ring.slot_states()[0].state is State.READY
        assert ring.get_ready_indices() == [0, 1]
        assert time.monotonic() - begun < 10  # a few waits of a quarter of a second
        frozen.send_signal(signal.SIGCONT)
        assert frozen.communicate(timeout=WAIT_S)[0] == "went on\n"
        assert ring.try_read(ref) == b"in slot 0"


@pytest.mark.skipif(not ring_locks._monotonic, reason="pthread_mutex_clocklock: glibc 2.30")
def test_a_wall_clock_set_back_does_not_prolong_the_wait_for_a_stopped_process(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is set back by an hour just after the wait has read it."""
    with SharedRing.create(1, 64) as ring:
        ring.write_raw(b"in slot 0")
        frozen = start("ring_frozen", ring.name)
        until(lambda: is_stopped(frozen.pid), "the stop")
        ahead_ns = time.time_ns() + 3600 * 10**9
        monkeypatch.setattr(time, "time_ns", lambda: ahead_ns)
        begun = time.monotonic()
        assert ring.claim(0) is Refusal.BUSY
        assert time.monotonic() - begun < WAIT_S


def test_a_lock_of_a_dead_process_is_taken_over(start: Start) -> None:
    """The process was killed in the middle of a step: the next one finds the slot unchanged."""
    with SharedRing.create(1, 64) as ring:
        ref = ring.write_raw(b"still there")
        frozen = start("ring_frozen", ring.name)
        until(lambda: is_stopped(frozen.pid), "the stop")
        frozen.kill()
        frozen.wait(WAIT_S)
        assert ring.read(ref, timeout_s=WAIT_S) == b"still there"


def test_a_dead_reader_gives_its_payload_back_before_its_lease(start: Start) -> None:
    """Another process sees that the reader is dead, and claims the payload."""
    with SharedRing.create(1, 64, lease_s=3600) as ring:
        ref = ring.write_raw(b"for two")
        child = start("ring_holder", ring.name)
        assert child.stdout is not None and child.stdout.readline() == "has it\n"
        assert ring.claim_ref(ref) is Refusal.BUSY
        child.kill()
        child.wait(WAIT_S)
        assert isinstance(until(lambda: isinstance(c := ring.claim_ref(ref), Claim) and c, "the payload"), Claim)
        assert ring.metrics().lapsed == 1


def test_what_a_killed_creator_leaves(start: Start) -> None:
    """The creator's resource tracker removes the file; processes that have attached can still read."""
    creator = start("ring_creator")
    assert creator.stdout is not None
    name, _ = creator.stdout.readline().split()
    ring = SharedRing.attach(name)
    creator.kill()
    creator.wait(WAIT_S)
    until(lambda: not (SHM / name).exists(), "the end of the file")
    assert ring.read(timeout_s=WAIT_S) == b"of the creator"
    ring.close()
    with pytest.raises(RingError, match="unlinked, or did its creator die"):
        SharedRing.attach(name)


def test_what_a_creator_leaves_that_is_killed_with_its_tracker(start: Start) -> None:
    """A sweep, by this or another process, removes the file, but not while the creator lives."""
    creator = start("ring_creator")
    assert creator.stdout is not None
    name, tracker = creator.stdout.readline().split()
    assert name not in sweep() and not is_gone(name)
    os.kill(int(tracker), signal.SIGKILL)
    until(lambda: not is_alive(int(tracker)), "the death of the tracker")
    creator.kill()
    creator.wait(WAIT_S)
    assert is_gone(name)
    sweep()
    assert not (SHM / name).exists()


def test_a_creator_that_ends_leaves_nothing(start: Start) -> None:
    """The creator removes its file, and its resource tracker, which ends after it, warns of nothing."""
    creator = start("ring_creator", stderr=subprocess.PIPE)
    assert creator.stdout is not None
    name, _ = creator.stdout.readline().split()
    creator.terminate()
    _, warnings = creator.communicate(timeout=WAIT_S)
    assert (creator.returncode, warnings) == (0, "")
    assert not (SHM / name).exists()


def test_forked_children_and_spawned_ones(start: Start) -> None:
    """Both use the ring. Neither finishes a claim of the parent's, nor removes the file."""
    helper = start("ring_family")
    said, _ = helper.communicate(timeout=WAIT_S)
    assert (helper.returncode, said) == (0, "well\n")
