"""`workload.section` as a worker uses it: in a process of its own, with the environment that an agent sets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvrx_slurm.workload.slot import Reading, Slot

Worker = Callable[[str], Reading]


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    slot = Slot.create(tmp_path / "slot")
    yield slot
    slot.close()


def run(code: str, environment: dict[str, str]) -> str:
    """Runs `code` as a worker, with `beat`, `section` and `look()` (the agent's reading); returns what it printed."""
    script = (
        "import os\n"
        "from nvrx_slurm.workload import beat, section\n"
        "def look():\n"
        "    from nvrx_slurm.workload.slot import Slot, map_slot\n"
        "    from nvrx_slurm.workload import progress\n"
        "    return Slot(progress.shared_words()).read()\n"
        "def names(): return [section.name for section in look().open]\n"
        f"{code}"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NVRX_")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=clean | environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


@pytest.fixture
def worker(slot: Slot, tmp_path: Path) -> Worker:
    """Runs code as a worker does, and returns the agent's reading at the end."""

    def work(code: str) -> Reading:
        run(code, {"RANK": "0", "NVRX_BEAT_FILE": str(tmp_path / "slot")})
        return slot.read()

    return work


def test_an_open_section_is_seen_with_its_deadline(worker: Worker) -> None:
    """Name, timeout and thread can be read while it is open; count and duration after its end."""
    reading = worker(
        "from time import monotonic_ns\n"
        "before = monotonic_ns()\n"
        "with section('checkpoint', timeout='10m'):\n"
        "    (seen,) = look().open\n"
        "    assert look().in_section and seen.main_thread\n"
        "    assert (seen.name, seen.timeout_s) == ('checkpoint', 600.0)\n"
        "    assert before < seen.started_ns < monotonic_ns()\n"
    )
    assert (reading.open, reading.in_section) == ((), False)
    count, largest_s = reading.seen["checkpoint"]
    assert count == 1
    assert 0 < largest_s < 60


def test_nested_sections_keep_their_own_deadlines(worker: Worker) -> None:
    """Each open section is read with its own deadline, even if the same object or name is used twice."""
    reading = worker(
        "outer = section('a', 5)\n"
        "with outer, section('b', timeout=0.5), section('c'), outer:\n"
        "    assert [(s.name, s.timeout_s) for s in look().open] == [('a', 5), ('b', 0.5), ('c', None), ('a', 5)]\n"
        "    assert len({s.started_ns for s in look().open}) == 4\n"
        "assert names() == []\n"
    )
    assert {name: count for name, (count, _) in reading.seen.items()} == {"a": 2, "b": 1, "c": 1}


def test_the_end_of_a_main_thread_section_is_a_sign(worker: Worker) -> None:
    """The silence after it counts from its end; neither its duration nor a beat inside it is recorded as a step's
    gap."""
    reading = worker(
        "from nvrx_slurm.workload import board, progress\n"
        "now = 10**15\n"
        "progress.monotonic_ns = board.monotonic_ns = lambda: now\n"
        "beat(step=0)\n"
        "now += 3_000\n"
        "with section('s'):\n"
        "    assert look().largest_gap_ns == 3_000\n"
        "    now += 1_000_000\n"
        "    beat(step=1)\n"
        "    now += 1_000_000\n"
        "assert look().sign_ns == now\n"
        "now += 4_000\n"
        "beat(step=2)\n"
    )
    assert reading.largest_gap_ns == 4_000
    assert reading.seen["s"] == (1, 0.002)


def test_a_section_before_the_first_beat_makes_no_gap(worker: Worker) -> None:
    """The duration of the start-up is not recorded as that of a step, and the first beat is announced as usual."""
    reading = worker(
        "from nvrx_slurm.workload import board, progress\n"
        "now = 10**15\n"
        "progress.monotonic_ns = board.monotonic_ns = lambda: now\n"
        "said = []\n"
        "progress._announce = said.append\n"
        "with section('load'): now += 10**9\n"
        "now += 10**9\n"
        "beat(step=7)\n"
        "assert said == [7]\n"
    )
    assert (reading.step, reading.beats, reading.largest_gap_ns) == (7, 1, 0)


def test_a_section_of_another_thread_does_not_stop_the_clock(worker: Worker) -> None:
    """It has its deadline, but neither while open nor at its end does it count as progress of the main loop."""
    worker(
        "import threading\n"
        "beat(step=0)\n"
        "sign = look().sign_ns\n"
        "opened, go = threading.Event(), threading.Event()\n"
        "def save():\n"
        "    with section('checkpoint', '10m'):\n"
        "        opened.set()\n"
        "        go.wait(20)\n"
        "thread = threading.Thread(target=save)\n"
        "thread.start()\n"
        "assert opened.wait(20)\n"
        "assert names() == ['checkpoint'] and not look().open[0].main_thread and not look().in_section\n"
        "go.set()\n"
        "thread.join()\n"
        "assert names() == [] and look().sign_ns == sign and look().seen['checkpoint'][0] == 1\n"
    )


def test_sections_of_many_threads_end_in_any_order(worker: Worker) -> None:
    """Of two hundred sections in eight threads, with shared and own names, none is lost and none stays open."""
    reading = worker(
        "import random, sys, threading\n"
        "sys.setswitchinterval(1e-6)\n"
        "def work(number):\n"
        "    for _ in range(25):\n"
        "        a, b = section('shared', 60), section(f'own {number}')\n"
        "        a.__enter__(); b.__enter__()\n"
        "        for one in random.sample([a, b], 2): one.__exit__(None, None, None)\n"
        "threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
    )
    assert reading.open == ()
    assert {name: count for name, (count, _) in reading.seen.items()} == {
        "shared": 200,
        **{f"own {number}": 25 for number in range(8)},
    }


def test_threads_may_share_an_object(worker: Worker) -> None:
    """Each thread ends its own section; the section of the main thread, in which no step is due, is ended only by
    itself."""
    worker(
        "import threading\n"
        "save = section('save', 10)\n"
        "opened, go = threading.Event(), threading.Event()\n"
        "def background():\n"
        "    with save:\n"
        "        opened.set()\n"
        "        go.wait(20)\n"
        "thread = threading.Thread(target=background)\n"
        "with save:\n"
        "    thread.start()\n"
        "    assert opened.wait(20)\n"
        "assert [one.main_thread for one in look().open] == [False] and not look().in_section\n"
        "go.set()\n"
        "thread.join()\n"
        "assert names() == [] and look().seen['save'][0] == 2\n"
        "save.__enter__()\n"
        "thread = threading.Thread(target=save.__exit__, args=(None, None, None))\n"
        "thread.start(); thread.join()\n"
        "assert names() == []\n"
    )


def test_sections_of_coroutines_end_in_any_order(worker: Worker) -> None:
    """The first section to be opened may end first; until the last one has ended, no step is due."""
    worker(
        "import asyncio\n"
        "async def part(name, opened, end):\n"
        "    with section(name):\n"
        "        opened.set()\n"
        "        await end.wait()\n"
        "async def main():\n"
        "    events = [asyncio.Event() for _ in range(4)]\n"
        "    a = asyncio.create_task(part('a', *events[:2]))\n"
        "    await events[0].wait()\n"
        "    b = asyncio.create_task(part('b', *events[2:]))\n"
        "    await events[2].wait()\n"
        "    assert names() == ['a', 'b']\n"
        "    events[1].set(); await a\n"
        "    assert names() == ['b'] and look().in_section\n"
        "    events[3].set(); await b\n"
        "    assert names() == [] and not look().in_section\n"
        "asyncio.run(main())\n"
    )


def test_an_exception_ends_a_section_and_records_no_duration(worker: Worker) -> None:
    """The section is closed, the exception propagates, and the duration of the failed attempt is not recorded."""
    reading = worker(
        "try:\n"
        "    with section('save', 5): raise OSError('disk full')\n"
        "except OSError as error:\n"
        "    assert str(error) == 'disk full'\n"
    )
    assert (reading.open, reading.in_section, dict(reading.seen)) == ((), False, {})


def test_a_section_that_is_dropped_ends(worker: Worker) -> None:
    """A section in a closed generator, or one whose exit never ran, does not stay open."""
    worker(
        "def parts():\n"
        "    with section('in a generator'): yield\n"
        "going = parts(); next(going)\n"
        "left = section('left'); left.__enter__()\n"
        "assert names() == ['in a generator', 'left']\n"
        "del going, left\n"
        "assert names() == [] and not look().in_section\n"
    )


def test_no_signals_exception_leaves_a_section_open(worker: Worker) -> None:
    """A signal handler raises, as Ctrl-C does, while sections are entered, open and left: after hundreds of signals
    none stays open."""
    worker(
        "import signal\n"
        "struck = 0\n"
        "class Struck(Exception): pass\n"
        "def strike(number, frame):\n"
        "    global struck\n"
        "    struck += 1\n"
        "    raise Struck\n"
        "signal.signal(signal.SIGALRM, strike)\n"
        "def rain():\n"
        "    while struck < 300:\n"
        "        try:\n"
        "            signal.setitimer(signal.ITIMER_REAL, 0.0003)\n"
        "            for _ in range(500):\n"
        "                with section('a', 5), section('b'): pass\n"
        "            signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "        except Struck: pass\n"
        "import sys; sys.unraisablehook = lambda _: None  # one that strikes inside of __del__\n"
        "rain()\n"
        "assert len(look().open) == 0 and not look().in_section, look()\n"
    )


def test_as_a_decorator_each_call_is_a_section(worker: Worker) -> None:
    """Functions, recursive ones too, and coroutine functions keep their name, result and deadline."""
    reading = worker(
        "import asyncio\n"
        "@section('down', timeout=30)\n"
        "def down(n):\n"
        "    'Counts.'\n"
        "    assert [s.timeout_s for s in look().open] == [30] * (4 - n)\n"
        "    return n and down(n - 1)\n"
        "@section('later')\n"
        "async def later(): return names()\n"
        "assert down(3) == 0 and down.__name__ == 'down' and down.__doc__ == 'Counts.'\n"
        "assert asyncio.iscoroutinefunction(later) and asyncio.run(later()) == ['later']\n"
    )
    assert {name: count for name, (count, _) in reading.seen.items()} == {"down": 4, "later": 1}


def test_a_forked_child_neither_opens_nor_closes_sections(worker: Worker) -> None:
    """The parent's open section stays open when the child leaves the block; the child's own sections are not
    recorded."""
    reading = worker(
        "with section('parent', 5):\n"
        "    child = os.fork()\n"
        "    if child: status = os.waitpid(child, 0)[1]\n"
        "    else: section('child').__enter__()\n"
        "if not child:\n"
        "    with section('later'): os._exit(names() != ['parent'])\n"
        "assert status == 0\n"
        "with section('after'): pass\n"
    )
    assert set(reading.seen) == {"parent", "after"}
    assert reading.open == ()


def test_only_one_process_of_a_worker_writes_sections(worker: Worker) -> None:
    """A child with its own interpreter opens no section while its parent has written some; a child that came first
    can."""
    reading = worker(
        "import subprocess, sys\n"
        "code = 'from nvrx_slurm.workload import section\\nwith section(sys.argv[1]): print(1)'\n"
        "def child(name): subprocess.run([sys.executable, '-c', 'import sys\\n' + code, name], check=True)\n"
        "child('first')\n"
        "with section('parent'): child('child')\n"
        "child('also')\n"
        "with section('parent'): pass\n"
    )
    assert {name: count for name, (count, _) in reading.seen.items()} == {"first": 1, "parent": 2}


def test_names_beyond_the_table_share_the_last_row(worker: Worker) -> None:
    """Fifteen names have rows of their own; all others are recorded as `…`, but with their own deadlines."""
    reading = worker(
        "for n in range(20):\n"
        "    with section(f's{n}', 7): assert look().open[0].timeout_s == 7\n"
        "with section('s3'): assert names() == ['s3']\n"
    )
    assert dict.fromkeys(reading.seen) == dict.fromkeys([*(f"s{n}" for n in range(15)), "…"])
    assert (reading.seen["s3"][0], reading.seen["…"][0]) == (2, 5)


def test_more_than_sixteen_at_a_time_are_not_watched(worker: Worker) -> None:
    """The seventeenth section has no deadline, but while it is open no step is due; entries can be used again
    afterwards."""
    worker(
        "from contextlib import ExitStack\n"
        "import threading\n"
        "for _ in range(3):\n"
        "    with ExitStack() as threads:\n"
        "        def background():\n"
        "            for n in range(16): threads.enter_context(section(f's{n % 3}', 5))\n"
        "        thread = threading.Thread(target=background); thread.start(); thread.join()\n"
        "        assert len(names()) == 16 and not look().in_section\n"
        "        with section('one too many'):\n"
        "            assert len(names()) == 16 and look().in_section\n"
        "    assert names() == [] and not look().in_section\n"
    )


WRONG = [
    ("section('')", "ValueError"),
    ("section('x' * 41)", "ValueError"),
    ("section('é' * 21)", "ValueError"),
    ("section('a\\nb')", "ValueError"),
    ("section('\\udc80')", "ValueError"),
    ("section(b'x')", "TypeError"),
    ("section(None)", "TypeError"),
    ("section('x', 0)", "ValueError"),
    ("section('x', -1)", "ValueError"),
    ("section('x', float('nan'))", "ValueError"),
    ("section('x', float('inf'))", "ValueError"),
    ("section('x', 'soon')", "ValueError"),
    ("section('x', '0s')", "ValueError"),
    ("section('x', True)", "TypeError"),
    ("section('x', [5])", "TypeError"),
    ("section('x')(lambda: (yield))", "TypeError"),
]


@pytest.mark.parametrize("listened", [True, False])
def test_mistakes_show_with_and_without_an_agent(slot: Slot, tmp_path: Path, listened: bool) -> None:
    """A wrong name or timeout raises an error that says what is valid, on a laptop as on the cluster."""
    code = "".join(
        f"try: {call}\nexcept (TypeError, ValueError) as e: print(type(e).__name__, e)\n" for call, _ in WRONG
    )
    said = run(code, {"NVRX_BEAT_FILE": str(tmp_path / "slot")} if listened else {}).splitlines()
    assert [line.split()[0] for line in said] == [kind for _, kind in WRONG]
    assert "1 to 40 bytes" in said[0]


@pytest.mark.parametrize("path", ["", "/nonexistent/slot", "/proc/self/maps", "/", "/dev/null"])
def test_without_a_slot_a_section_does_nothing(path: str) -> None:
    """The body runs, also with nested and decorated sections, and nothing is printed."""
    code = "with section('a'), section('b', 5): section('c')(print)('ran')"
    assert run(code, {"NVRX_BEAT_FILE": path}) == "ran\n"


def test_a_slot_that_has_gone_stops_no_training(worker: Worker) -> None:
    """It is no error in the worker if its agent removes the folder while the worker still runs."""
    worker("beat(step=1)\nos.unlink(os.environ['NVRX_BEAT_FILE'])\nwith section('late'): beat(step=2)\n")


KILLED = """
from nvrx_slurm.workload import beat, section
beat(step=1)
print("up", flush=True)
while True:
    with section("a", timeout=5), section("b"):
        beat(step=2)
"""


def test_a_worker_killed_in_the_middle_leaves_a_readable_slot(slot: Slot, tmp_path: Path) -> None:
    """After SIGKILL at any moment, only the worker's own sections are read, or none; its successor starts with none
    open."""
    environment = os.environ | {"RANK": "0", "NVRX_BEAT_FILE": str(tmp_path / "slot")}
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", KILLED], env=environment, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            deadline = time.monotonic() + 20
            while not slot.read().open and time.monotonic() < deadline:
                pass
            process.send_signal(signal.SIGKILL)
        for section in slot.read().open:
            assert (section.name, section.timeout_s) in {("a", 5.0), ("b", None)}
    run("with section('next'): assert names() == ['next']", {"NVRX_BEAT_FILE": str(tmp_path / "slot")})
    assert (slot.read().open, slot.read().in_section) == ((), False)


def test_a_reader_never_takes_a_section_for_another(slot: Slot, tmp_path: Path) -> None:
    """While a process opens and closes sections as fast as it can, every section that is read is whole and
    current."""
    environment = os.environ | {"RANK": "0", "NVRX_BEAT_FILE": str(tmp_path / "slot")}
    with subprocess.Popen([sys.executable, "-c", KILLED], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seen = set()
        reads = 0
        while reads < 5_000 or len(seen) < 2:
            now = time.monotonic_ns()
            reading = slot.read()
            reads += 1
            seen |= {(section.name, section.timeout_s, section.main_thread) for section in reading.open}
            assert reading.in_section or now - reading.sign_ns < 20_000_000_000
        process.kill()
    assert seen == {("a", 5.0, True), ("b", None, True)}
