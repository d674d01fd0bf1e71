"""Stacks of real processes in every state that a worker can hang in."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
import threading
from pathlib import Path

import pytest

from nvrx_slurm.diagnostics.stacks.dump import DumpMethod, dump
from nvrx_slurm.diagnostics.stacks.hook_client import DUMP_SIGNAL
from nvrx_slurm.diagnostics.stacks.process import describe
from nvrx_slurm.util.processes import is_alive
from tests.waiting import until

DEADLINE_S = 20.0
WHY = "no progress for 30 s"
HOLDS_GIL = """
import ctypes
def stuck():
    libc = ctypes.PyDLL(None)  # keeps the GIL, unlike CDLL
    print("up", flush=True)
    while True: libc.sleep(1000)
stuck()
"""
DEADLOCK = """
import threading
lock = threading.Lock()
def step():
    with lock:
        print("up", flush=True)
        lock.acquire()
step()
"""
BUSY = """
def spin():
    print("up", flush=True)
    while True: pass
spin()
"""
IN_C_LOOP = """
def count():
    print("up", flush=True)
    sum(iter(int, 1))
count()
"""
IDLE = "import signal\ndef wait():\n  print('up', flush=True)\n  while True: signal.pause()\nwait()"


@pytest.fixture
def take(dump_dir, tmp_path):
    """Takes a dump of groups, with py-spy only if the test asks for it."""

    def take(groups, **options):
        wanted = {"timeout_s": DEADLINE_S, "py_spy": False, "out": tmp_path / "out", **options}
        return asyncio.run(dump(groups, dump_dir=dump_dir, why=WHY, **wanted))

    return take


def state_of(pid):
    state = describe(pid)
    return state.state if state else None


@pytest.mark.parametrize(
    ("code", "frame"),
    [(HOLDS_GIL, "in stuck"), (DEADLOCK, "in step"), (BUSY, "in spin"), (IN_C_LOOP, "in count"), (IDLE, "in wait")],
    ids=["holds the GIL", "deadlock", "busy loop", "C loop", "idle"],
)
def test_hung_worker_shows_where(start, take, code, frame):
    """The stack of a hung Python worker names the function in which it hangs, and the worker goes on."""
    worker = start(code)
    report = take({"rank 3": [worker.pid]})
    assert report.answered[DumpMethod.HOOK] == (worker.pid,)
    assert report.last_lines["rank 3"].endswith(frame)
    assert report.problems == ()
    text = report.files["rank 3"].read_text()
    assert text.startswith("=== ")
    assert f"Z {WHY} | rank 3, pid {worker.pid} (python" in text
    assert frame in text and "wchan" in text
    assert is_alive(worker.pid)


def test_all_threads_are_shown_and_the_main_one_is_reported(start, take):
    """Every thread has its stack in the file; the last line is the main thread's."""
    worker = start(
        "import threading, signal\n"
        "gate = threading.Event()\n"
        "def load(): up.wait(); gate.wait()\n"
        "up = threading.Barrier(4)\n"
        "for _ in range(3): threading.Thread(target=load, daemon=True).start()\n"
        "def train():\n  up.wait(); print('up', flush=True)\n  while True: signal.pause()\n"
        "train()"
    )
    report = take({"rank 0": [worker.pid]})
    assert report.files["rank 0"].read_text().count("in load") == 3
    assert report.last_lines["rank 0"].endswith("in train")


def test_more_threads_than_are_printed(start, take):
    """If faulthandler leaves out the main thread, no other thread is taken for it, and py-spy is asked."""
    _need_py_spy()
    worker = start(
        "import threading, signal\n"
        "gate = threading.Event()\n"
        "for _ in range(120): threading.Thread(target=gate.wait, daemon=True).start()\n"
        "def train():\n  print('up', flush=True)\n  while True: signal.pause()\n"
        "train()"
    )
    alone = take({"rank 0": [worker.pid]})
    assert alone.last_lines == {} and "the oldest are missing" in alone.files["rank 0"].read_text()
    assert take({"rank 0": [worker.pid]}, py_spy=True).last_lines["rank 0"].endswith("in train")


def test_threads_that_block_all_signals_do_not_hold_up_the_answer(start, take):
    """Some libraries have such threads: they never take the signal, and are not waited for."""
    worker = start(
        "import threading, signal\n"
        "up, gate = threading.Event(), threading.Event()\n"
        "def deaf():\n  signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); up.set(); gate.wait()\n"
        "threading.Thread(target=deaf, daemon=True).start()\n"
        "up.wait(); print('up', flush=True)\nwhile True: signal.pause()"
    )
    report = take({"rank 0": [worker.pid]})
    assert report.answered[DumpMethod.HOOK] == (worker.pid,)
    assert "did not end" not in report.files["rank 0"].read_text()


def test_forked_child_answers_for_itself(start, take):
    """A child made by fork, such as a data loader's, writes into its own file, and its parent's stays whole."""
    worker = start(
        "import os, signal\n"
        "ready, go = os.pipe()\n"
        "def child():\n  os.read(ready, 1)\n  print(os.getpid(), flush=True)\n  while True: signal.pause()\n"
        "def parent():\n  os.write(go, b'.')\n  while True: signal.pause()\n"
        "child() if os.fork() == 0 else parent()"
    )
    child = int(worker.said)
    report = take({"rank 0": [worker.pid, child]})
    assert report.answered[DumpMethod.HOOK] == (worker.pid, child)
    text = report.files["rank 0"].read_text()
    assert "in parent" in text.partition(f"pid {child} ")[0]
    assert "in child" in text.partition(f"pid {child} ")[2]
    assert report.last_lines["rank 0"].endswith("in parent")


def test_child_that_inherits_only_the_handler_is_not_asked(start, take, dump_dir):
    """A child forked by native code would answer into its parent's file: it is only described, and lives."""
    worker = start(
        "import ctypes, os, signal\n"
        "pid = ctypes.PyDLL(None).fork()\n"
        "if pid == 0: os.write(1, b'%d\\n' % os.getpid())\n"
        "while True: signal.pause()"
    )
    child = int(worker.said)
    report = take({"rank 0": [worker.pid, child]})
    assert report.answered == {DumpMethod.HOOK: (worker.pid,), DumpMethod.PY_SPY: (), DumpMethod.PROC: (child,)}
    assert "it has no hook" in report.files["rank 0"].read_text()
    assert is_alive(child)


def test_program_without_python_is_described(start, take):
    """The dump has any program's state, its files and what it waits in, and the program lives."""
    worker = start(argv=["sh", "-c", "echo up; exec sleep 1000"])
    until(lambda: "nanosleep" in Path(f"/proc/{worker.pid}/wchan").read_text(), "sh has become sleep, and sleeps")
    report = take({"rank 0": [worker.pid]})
    assert report.answered[DumpMethod.PROC] == (worker.pid,)
    text = report.files["rank 0"].read_text()
    assert "it has no hook" in text and "sleep 1000" in text and "clock_nanosleep" in text
    assert is_alive(worker.pid)


def test_stopped_process_is_not_asked(start, take):
    """A stopped process is only described; when it is continued, no signal of the dump is pending."""
    worker = start(IDLE)
    os.kill(worker.pid, signal.SIGSTOP)
    until(lambda: state_of(worker.pid) == "T", "it is stopped")
    report = take({"rank 0": [worker.pid]})
    assert report.answered[DumpMethod.PROC] == (worker.pid,)
    assert "it is stopped" in report.files["rank 0"].read_text()
    os.kill(worker.pid, signal.SIGCONT)
    assert take({"rank 0": [worker.pid]}).answered[DumpMethod.HOOK] == (worker.pid,)


def test_process_in_uninterruptible_sleep_is_not_asked(start, take, tmp_path):
    """A process in state D, here until its vfork child gets past a FIFO, is only described, and then ends as
    usual."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    worker = start(
        "import os, sys\nprint('up', flush=True)\n"
        f"os.posix_spawn('/bin/true', ['true'], {{}}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, {str(fifo)!r}, 0, 0)])\n"
    )
    until(lambda: state_of(worker.pid) == "D", "it is in uninterruptible sleep")
    report = take({"rank 0": [worker.pid]}, timeout_s=5.0)
    assert report.answered[DumpMethod.PROC] == (worker.pid,)
    assert "state    D" in report.files["rank 0"].read_text()
    with fifo.open("wb"):
        assert worker.wait(DEADLINE_S) == 0


@pytest.mark.parametrize(
    "code",
    [
        "signal.signal(signum, signal.SIG_DFL)",
        "signal.signal(signum, signal.SIG_IGN)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signum])",
        "faulthandler.unregister(signum)",
        "os.closerange(3, 65536)",
    ],
)
def test_no_process_is_killed_by_the_question(start, take, code):
    """A program that took the handler away, blocks the signal or closed the hook's file is only described, and
    lives."""
    worker = start(
        f"import faulthandler, os, signal\nsignum = {DUMP_SIGNAL}\n{code}\n"
        "print('up', flush=True)\nwhile True: signal.pause()"
    )
    assert take({"rank 0": [worker.pid]}).answered[DumpMethod.PROC] == (worker.pid,)
    assert is_alive(worker.pid)


def test_process_that_has_ended_is_no_problem(start, take):
    """A process may end at any moment: the file says so, and there is no problem."""
    worker = start("print('up', flush=True)")
    worker.wait(DEADLINE_S)
    report = take({"rank 0": [worker.pid, 2**22 - 1]})
    assert report.problems == () and not any(report.answered.values())
    assert report.files["rank 0"].read_text().count("it has ended") == 2


def test_process_that_was_not_reaped_has_ended(start, take):
    """A zombie counts as ended."""
    worker = start("print('up', flush=True)")
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    report = take({"rank 0": [worker.pid]})
    assert not any(report.answered.values())
    assert "it has ended" in report.files["rank 0"].read_text()


def test_second_dump_is_appended_and_holds_only_its_own(start, take):
    """Two dumps of one cycle follow each other in the file, each with the stacks of its moment."""
    worker = start(IDLE)
    take({"rank 0": [worker.pid]})
    first = take({"rank 0": [worker.pid]}).files["rank 0"]
    text = first.read_text()
    assert (text.count("=== "), text.count("Current thread")) == (2, 2)
    assert stat.S_IMODE(first.stat().st_mode) == 0o600


def test_dead_processes_leave_no_answer_files(start, take, dump_dir):
    """A dump removes the answer files of processes that have ended, and keeps those of the living."""
    worker, ended = start(IDLE), start("print('up', flush=True)")
    ended.wait(DEADLINE_S)
    assert (dump_dir / str(ended.pid)).exists()
    take({"rank 0": [worker.pid]})
    until(lambda: not (dump_dir / str(ended.pid)).exists(), "the file is removed")
    assert (dump_dir / str(worker.pid)).exists()


def test_many_ranks_have_a_file_each(start, take):
    """All ranks are asked together; labels become file names."""
    workers = {f"rank {rank}": [start(IDLE).pid] for rank in range(4)}
    report = take(workers)
    assert {label: path.name for label, path in report.files.items()} == {
        f"rank {rank}": f"rank-{rank}.txt" for rank in range(4)
    }
    assert set(report.last_lines) == set(workers)


def test_nothing_to_dump_is_no_error(take):
    """Without any process the report is empty."""
    report = take({})
    assert report.files == {} and report.problems == ()


def test_stuck_file_system_does_not_hold_up_the_caller(start, take, tmp_path):
    """If a write hangs, here on a FIFO without a reader, the dump returns and says what it could not write."""
    out = tmp_path / "out"
    out.mkdir()
    os.mkfifo(out / "rank-0.txt")
    report = take({"rank 0": [start(IDLE).pid]}, timeout_s=2.0)
    assert report.files == {}
    assert [problem for problem in report.problems if "rank-0.txt" in problem and "in time" in problem]
    assert report.last_lines["rank 0"].endswith("in wait")
    drain = threading.Thread(target=(out / "rank-0.txt").read_bytes, daemon=True)  # lets the writing thread end
    drain.start()
    drain.join(DEADLINE_S)


def test_folder_that_cannot_be_written_is_a_problem(start, take, tmp_path):
    """The report says which stacks are lost and why."""
    (tmp_path / "file").write_text("")
    report = take({"rank 0": [start(IDLE).pid]}, out=tmp_path / "file" / "out")
    assert "rank-0.txt: Not a directory; the stacks of rank 0 are lost" in report.problems[0]


def test_py_spy_answers_where_the_hook_cannot(start, take):
    """py-spy shows the stack of a Python process that took the handler away, without stopping it."""
    _need_py_spy()
    worker = start(f"import signal\nsignal.signal({DUMP_SIGNAL}, signal.SIG_DFL)\n{IDLE}")
    report = take({"rank 0": [worker.pid]}, py_spy=True)
    assert report.answered[DumpMethod.PY_SPY] == (worker.pid,)
    assert "in wait" in report.last_lines["rank 0"]
    assert is_alive(worker.pid)


def _need_py_spy():
    if not Path(sys.executable).with_name("py-spy").exists():
        pytest.skip("py-spy is not installed")


def test_py_spy_shows_native_frames_of_those_about_to_end(start, take):
    """If py-spy may pause the process, it names the C function too."""
    _need_py_spy()
    worker = start(f"import signal\nsignal.signal({DUMP_SIGNAL}, signal.SIG_DFL)\n{IDLE}")
    report = take({"rank 0": [worker.pid]}, py_spy=True, may_pause=True)
    assert report.answered[DumpMethod.PY_SPY] == (worker.pid,)
    assert "libc" in report.files["rank 0"].read_text().partition("command")[0]
    assert state_of(worker.pid) == "S"


def test_gpus_are_asked_once(take, tmp_path, monkeypatch):
    """The output of nvidia-smi is in a file of its own."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho GPU 0: 80 GiB\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert "GPU 0: 80 GiB" in take({}, gpus=True).files["gpus"].read_text()
