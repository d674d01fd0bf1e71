"""Programs as users write them: what they may wrap, and how they continue after a restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inprocess.harness import _FOREIGN, ROOT
from tests.inprocess.logs import WAIT_S

BEGINNING = """
import asyncio, functools, os, sys, threading, weakref
from nvrx_slurm import inprocess
from nvrx_slurm.inprocess import CallWrapper
wrapper = inprocess.Wrapper(store_factory=inprocess.store.FileStore, store_kwargs={"path": sys.argv[1]})
"""


def without_launcher() -> dict[str, str]:
    """This environment, without the variables that a launcher sets."""
    launchers = (*_FOREIGN, "RANK", "WORLD")
    return {name: value for name, value in os.environ.items() if not name.startswith(launchers)}


def run(program: str, folder: Path, world: int = 1) -> list[tuple[int, str, str]]:
    """Run one process per rank to its end. Returns the exit code, standard output and standard error of each."""
    script = folder / "program.py"
    script.write_text(BEGINNING + program)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder / "store")],
            env=without_launcher() | {"RANK": str(rank), "WORLD_SIZE": str(world), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=WAIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()  # otherwise open pipes of a rank that has not ended would fail the next test
    print(said)
    return [(rank.returncode, *each) for rank, each in zip(ranks, said, strict=True)]


MEMORY = """
class Memory:
    pass

made, kept = [], []

def read(batch):
    buffer = Memory()
    made.append(weakref.ref(buffer))
    raise KeyError(batch)

def train(call: CallWrapper):
    print(sum(memory() is not None for memory in made), "alive", flush=True)
    if call.iteration == 3:
        return
    model = Memory()
    made.append(weakref.ref(model))
    try:
        read(call.iteration)
    except KeyError as error:
        kept.append(error)
        raise ValueError("no batch") from error

wrapper(train)()
"""


def test_a_rank_that_failed_enters_again_without_its_memory(tmp_path: Path) -> None:
    """The frames of an error, and of the error that caused it, are released before the next iteration, even if the
    program keeps the errors."""
    [(code, out, _)] = run(MEMORY, tmp_path)
    assert (code, out.splitlines()) == (0, ["0 alive"] * 4)


CALLABLES = """
def train(steps, call: CallWrapper = None):
    print("train", steps, type(call).__name__, flush=True)

class Trainer:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self, call: CallWrapper):
        print("trainer", self.steps, type(call).__name__, flush=True)

wrapper(functools.partial(train, 5))()
wrapper(functools.partial(functools.partial(train), steps=6))()
wrapper(Trainer(7))()
wrapper(Trainer(8).__call__)()
"""


def test_every_callable_can_be_wrapped(tmp_path: Path) -> None:
    """A functools.partial and an object with __call__ get their call too."""
    [(code, out, _)] = run(CALLABLES, tmp_path)
    assert code == 0
    ours = "CallWrapper"
    assert out.splitlines() == [f"train 5 {ours}", f"train 6 {ours}", f"trainer 7 {ours}", f"trainer 8 {ours}"]


@pytest.mark.parametrize(
    "defined",
    [
        "async def train(): ...",
        "async def train(): yield",
        "def train(): yield",
        "class Train:\n    async def __call__(self): ...\ntrain = Train()",
        "async def steps(size): yield\ntrain = functools.partial(steps, 1)",
    ],
)
def test_what_returns_before_it_has_run_is_refused(tmp_path: Path, defined: str) -> None:
    """Coroutines and generators are refused: their first call would complete at once, without running a step."""
    [(code, _, err)] = run(f"{defined}\nwrapper(train)", tmp_path)
    assert code != 0
    assert "is a coroutine or a generator; wrap what runs it to its end" in err


GROUP = """
import torch.distributed

torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}.torch", rank=0, world_size=1)

def train(call: CallWrapper):
    print("train", flush=True)

try:
    wrapper(train)()
except inprocess.exception.OptionError as error:
    print(error, flush=True)
torch.distributed.destroy_process_group()
wrapper(train)()
"""


@pytest.mark.torch
def test_a_process_group_from_before_the_call_is_refused(tmp_path: Path) -> None:
    """The first restart would destroy the process group. Without one, the call runs."""
    [(code, out, err)] = run(GROUP, tmp_path)
    assert code == 0, err
    refused, trained = out.splitlines()
    assert "call init_process_group inside of the wrapped function" in refused
    assert trained == "train"


MEETING = """
import signal
import torch.distributed as dist

rank, ports = int(os.environ["RANK"]), dist.FileStore(f"{sys.argv[1]}.torch", 3)
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    ports.set("port", str(store.port))
else:
    store = dist.TCPStore("127.0.0.1", int(ports.get("port")))

class Count(inprocess.finalize.Finalize):
    def __call__(self, state):
        store.add("finalized", 1)
        return state

wrapper = inprocess.Wrapper(
    store_factory=inprocess.store.FileStore, store_kwargs={"path": sys.argv[1]}, finalize=Count()
)

def train(call: CallWrapper):
    here = dist.PrefixStore(str(call.iteration), store)
    here.set(f"here {rank}", "")
    if rank == 2:
        here.wait(["here 0", "here 1"])
        if call.iteration == 0:
            raise RuntimeError("the first failure")
        os.kill(os.getpid(), signal.SIGKILL)
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=here, rank=int(os.environ["RANK"]), world_size=world)
    group = dist.group.WORLD.size()
    dist.destroy_process_group()
    return call.iteration, group

if __name__ == "__main__":
    print(*wrapper(train)(), flush=True)
    store.set(f"over {rank}", "")
    store.wait(["over 0", "over 1"])
    if rank == 1:
        store.set("seen", "")
    else:
        store.get("seen")
"""


@pytest.mark.torch
def test_a_rank_fails_while_the_others_meet_again(tmp_path: Path) -> None:
    """Ranks that wait for a failed one in `init_process_group` are interrupted without a timeout, after an exception
    and after a death. Their store, which is older than the call, still works in Finalize, in the next iteration and
    at the end."""
    *others, (code, _, _) = run(MEETING, tmp_path, world=3)
    assert code == -signal.SIGKILL
    assert [(code, out) for code, out, _ in others] == [(0, "2 2\n"), (0, "2 2\n")]


SPAWNED = """
import multiprocessing

def say(word, rank):
    os.write(1, f"{word} {sys.argv[2]} {rank}\\n".encode())  # one write: two ranks have one pipe

def train(call: CallWrapper):
    say("train", os.environ["RANK"])
    sys.stdin.read()

def rank(number, stdin):
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    sys.stdin = open(stdin)
    try:
        wrapper(train)()
    except inprocess.exception.StoreError:
        say("refused", number)

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    children = [spawn.Process(target=rank, args=(number, sys.argv[3])) for number in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
"""


def test_runs_that_multiprocessing_starts_do_not_mix(tmp_path: Path) -> None:
    """Of two programs with the same address and port that start at once, both ranks of one run, and neither of the
    other's."""
    script, hold = tmp_path / "program.py", tmp_path / "hold"
    script.write_text(BEGINNING + SPAWNED)
    os.mkfifo(hold)
    programs = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "store"), name, str(hold)],
            env=without_launcher() | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    try:
        # The FIFO opens once a rank reads it. The ranks of one program keep running until it is closed.
        with hold.open("w"):
            refused = [line for program in programs for line in _lines(program, 2)]
        for program in programs:
            program.wait(WAIT_S)
    finally:
        for program in programs:
            program.kill()
            program.communicate()
    said = sorted(line.split()[:2] for line in refused)
    assert said in ([["refused", "a"]] * 2 + [["train", "b"]] * 2, [["refused", "b"]] * 2 + [["train", "a"]] * 2)


def _lines(program: subprocess.Popen[str], count: int) -> list[str]:
    assert program.stdout is not None
    return [program.stdout.readline() for _ in range(count)]


PUBLISHES = """
class Published(inprocess.rank_assignment.RankAssignment):
    def __init__(self, what):
        self.what = what

    def publish(self, state):
        return self.what

    def __call__(self, ctx):
        return ctx

def train(): ...

for what in (1, 2), "host1":
    for assignment in Published(what), inprocess.Compose(inprocess.ShiftRanks(), Published(what)):
        wrapper = inprocess.Wrapper(
            store_factory=inprocess.store.FileStore, store_kwargs={"path": sys.argv[1]}, rank_assignment=assignment
        )
        try:
            wrapper(train)()
        except inprocess.exception.InternalError as error:
            print(error)
"""


def test_what_a_rank_publishes_is_a_tuple_of_strings(tmp_path: Path) -> None:
    """Any other value ends the call at once: the other ranks could not read it, and would wait for this one."""
    [(code, out, _)] = run(PUBLISHES, tmp_path)
    said = "Published.publish must return a tuple of strings, not"
    assert (code, out.splitlines()) == (0, [f"{said} {what}" for what in ("(1, 2)", "'host1'") for _ in range(2)])


WITH_ANOTHER_RUN = """
import time
from nvrx_slurm.inprocess import admission

def train():
    raise inprocess.exception.RestartAbort

for admission.OLDER_S in 3.0, 3600.0:
    began = time.monotonic()
    try:
        inprocess.Wrapper(store_factory=inprocess.store.FileStore, store_kwargs={"path": sys.argv[1]})(train)()
    except inprocess.exception.RestartAbort:
        print("waited" if time.monotonic() - began >= admission.OLDER_S else "left", flush=True)
"""


def test_a_process_waits_for_an_older_run_only_in_its_first_call(tmp_path: Path) -> None:
    """Another process on this host has the same rank and no group name: it may belong to an older run."""
    with subprocess.Popen(["sleep", "1000"], env=without_launcher() | {"RANK": "0"}) as older:
        try:
            [(code, out, _)] = run(WITH_ANOTHER_RUN, tmp_path)
        finally:
            older.kill()
    assert (code, out.split()) == (0, ["waited", "left"])


YEARS = """
from datetime import timedelta

def train(call: CallWrapper):
    if call.iteration == 0:
        raise ValueError
    print(call.iteration)

bounds = dict(soft_timeout=1, hard_timeout=36500, barrier_timeout=36600)
inprocess.Wrapper(
    store_factory=inprocess.store.FileStore,
    store_kwargs={"path": sys.argv[1]},
    **{name: timedelta(days=days) for name, days in bounds.items()},
)(train)()
"""


def test_bounds_of_years_mean_no_bounds(tmp_path: Path) -> None:
    """A restart works with timeouts of years: the section that it opens has an upper limit."""
    [(code, out, _)] = run(YEARS, tmp_path)
    assert (code, out) == (0, "1\n")


FORKED = """
import signal

hook, handler = sys.unraisablehook, signal.getsignal(signal.SIGRTMAX - 4)

@wrapper
def train():
    if os.fork() == 0:
        return "child"
    os.wait()

if train() == "child":
    assert (sys.unraisablehook, signal.getsignal(signal.SIGRTMAX - 4)) == (hook, handler)
    try:
        train()
    except inprocess.exception.NestedCallError as error:
        print("refused:", error, flush=True)
    os._exit(0)
print("the rank has completed")
"""


def test_a_forked_child_that_returns_has_its_own_signals_back(tmp_path: Path) -> None:
    """The child has its former hooks and signal handlers. Its own wrapped call is refused, with the reason."""
    [(code, output, errors)] = run(FORKED, tmp_path)
    assert code == 0, errors
    assert "refused: this process was forked" in output
    assert "the rank has completed" in output


SAVING = """
import time
from datetime import timedelta

class Save(inprocess.Terminate):
    def __call__(self, state):
        until = time.monotonic() + 8.0
        while time.monotonic() < until:
            time.sleep(0.02)
        print("saved", flush=True)
        return state

bounds = dict(soft_timeout=2, hard_timeout=4)

def train(call: CallWrapper):
    call.ping()
    raise inprocess.exception.RestartAbort

try:
    inprocess.Wrapper(
        store_factory=inprocess.store.FileStore,
        store_kwargs={"path": sys.argv[1]},
        terminate=Save(),
        **{name: timedelta(seconds=seconds) for name, seconds in bounds.items()},
    )(train)()
except inprocess.exception.RestartAbort:
    print("left")
"""


def test_terminate_may_take_longer_than_the_hard_timeout_after_a_ping(tmp_path: Path) -> None:
    """Pings of the function do not count in Terminate, where running Python is progress."""
    [(code, out, errors)] = run(SAVING, tmp_path)
    assert (code, out.split()) == (0, ["saved", "left"]), errors


STUCK = """
import contextlib
import threading
from datetime import timedelta

bounds = dict(soft_timeout=3, hard_timeout=5, heartbeat_timeout=12, barrier_timeout=20, termination_grace_time=1)

def train(call: CallWrapper):
    if call.iteration:
        return "done"
    if os.environ["RANK"] == "1":
        open(inside).close()  # rank 0 is in its part: the failure does not come before
        raise ValueError
    with call.atomic(), call.disable_hang_protection():
        open(inside, "w").close()
        threading.Event().wait()

inside = sys.argv[1] + ".inside"
with contextlib.suppress(FileExistsError):
    os.mkfifo(inside)
print(inprocess.Wrapper(
    store_factory=inprocess.store.FileStore,
    store_kwargs={"path": sys.argv[1]},
    **{name: timedelta(seconds=seconds) for name, seconds in bounds.items()},
)(train)())
"""


def test_an_atomic_part_that_waits_for_a_rank_that_failed_is_ended(tmp_path: Path) -> None:
    """An atomic part without hang protection, as a barrier in a large checkpoint, is bounded only by the
    interruption."""
    (stuck, _, _), (code, out, errors) = run(STUCK, tmp_path, world=2)
    assert (stuck, code, out) == (-signal.SIGTERM, 0, "done\n"), errors


UNWATCHED = """
if os.environ["RANK"] == "1":
    sys.executable = "/nowhere/python"  # as where the environment was replaced

@wrapper
def train(call: CallWrapper):
    return os.environ["WORLD_SIZE"]

print(train())
"""


def test_the_others_go_on_without_a_rank_that_cannot_start_its_monitor(tmp_path: Path) -> None:
    """The rank itself reports that it fails. Otherwise the others would wait for it until `barrier_timeout`, and
    leave with an error."""
    (code, out, errors), (failed, _, said) = run(UNWATCHED, tmp_path, world=2)
    assert (code, out) == (0, "1\n"), errors
    assert failed == 1 and "/nowhere/python" in said


CALLBACKS_THAT_FORK = """
def fork(state):
    if os.fork() == 0:
        sys.exit(0)
    assert os.wait()[1] == 0
    return state

class Finalize(inprocess.finalize.Finalize):
    __call__ = staticmethod(fork)

class Completion(inprocess.completion.Completion):
    __call__ = staticmethod(fork)

def train(call: CallWrapper):
    if call.iteration == 0:
        raise ValueError
    return call.iteration

print(inprocess.Wrapper(
    store_factory=inprocess.store.FileStore,
    store_kwargs={"path": sys.argv[1]},
    finalize=Finalize(),
    completion=Completion(),
)(train)(), flush=True)
"""


def test_a_child_that_a_callback_forks_takes_no_part(tmp_path: Path) -> None:
    """The child ends as a program does, and its parent is still a rank."""
    [(code, out, errors)] = run(CALLBACKS_THAT_FORK, tmp_path)
    assert (code, out) == (0, "1\n"), errors
