"""Workers and their supervisor: real processes, real signals."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from nvrx_slurm.agent import supervisor, workers
from nvrx_slurm.agent.supervisor import descendants, send_all
from nvrx_slurm.agent.workers import (
    CommandExited,
    Exited,
    Released,
    Spawned,
    Stopped,
    SupervisorDied,
    Tearing,
    WarmSaid,
    Workers,
)
from nvrx_slurm.liveness import fence
from nvrx_slurm.util.processes import is_alive
from tests import frozen_fs
from tests.harness import wait_gone

STUBBORN = "import signal, os; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write(1, b'up'); signal.pause()"
SAVING = (
    "import os, signal\n"
    "def save(*_): os.write(1, b'saved'); os._exit(0)\n"
    "signal.signal(signal.SIGUSR1, save); os.write(1, b'up')\n"
    "while True: signal.pause()"
)
SAVING_ON_TERM = (
    "import os, signal, time; "
    'signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"saved"), os._exit(0))); '
    'os.write(1, b"up"); [signal.pause() for _ in iter(int, 1)]'
)
FORKING = (
    "import os, signal\nfor _ in range(50):\n  if os.fork() == 0: signal.pause()\nos.write(1, b'up'); signal.pause()"
)
DETACHING = (
    "import os, signal\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "if os.fork() == 0:\n"
    "  os.setsid()\n"
    "  if os.fork() == 0: os.write(1, b'%d\\n' % os.getpid()); signal.pause()\n"
    "  os._exit(0)\n"
    "os.wait(); signal.pause()"
)
"""Leaves a process behind: in a session of its own, its parent gone, deaf to SIGTERM."""


class Node:
    """Workers whose events can be awaited."""

    def __init__(self) -> None:
        self.events: asyncio.Queue = asyncio.Queue()
        self.workers = Workers(self.events.put_nowait)
        self.workers.start()

    async def next(self, kind, timeout=20.0):
        async with asyncio.timeout(timeout):
            while not isinstance(event := await self.events.get(), kind):
                pass
            return event

    def everybody(self):
        """The supervisor and its descendants."""
        return [self.workers.supervisor_pid, *descendants(self.workers.supervisor_pid)]

    def spawn(self, rank, *argv, env=None, cwd="/"):
        reading, writing = os.pipe()
        self.workers.spawn(rank, argv, env or {}, cwd, writing, os.dup(2))
        return os.fdopen(reading, "rb")


@pytest.fixture
async def node():
    node = Node()
    yield node
    everybody = node.everybody()
    node.workers.close()
    wait_gone(everybody)


@pytest.fixture
def others():
    """A process unrelated to any node, and its child."""
    with subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as other:
        pids = [int(other.stdout.readline()), other.pid]
        yield pids
        send_all(pids, signal.SIGKILL)


async def test_worker_runs_with_its_environment_and_folder(node, tmp_path):
    """A worker gets the requested environment and folder; its output and exit code are reported."""
    code = "import os; print(os.environ['A'], os.getcwd()); raise SystemExit(7)"
    with node.spawn(3, sys.executable, "-c", code, env={"A": "x y\n"}, cwd=str(tmp_path)) as output:
        assert (await node.next(Spawned)).rank == 3
        ended = await node.next(Exited)
        assert ended == Exited(rank=3, code=7, at=ended.at)
        assert ended.at is not None
        assert ended.at <= time.monotonic()
        assert output.read().decode() == f"x y\n {tmp_path}\n"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGRTMIN + 6])
async def test_signal_is_reported_by_its_number(node, number):
    """A worker that a signal ended is reported with the signal's number, even if the signal has no name."""
    with node.spawn(0, "sleep", "1000"):
        os.kill((await node.next(Spawned)).pid, number)
        ended = await node.next(Exited)
        assert ended == Exited(rank=0, signal=number, at=ended.at)


@pytest.mark.parametrize(
    ("argv", "cwd", "why"), [(["no-such"], "/", "No such program"), (["sleep", "1"], "/no/folder", "No such file")]
)
async def test_worker_that_cannot_start_says_why(node, argv, cwd, why):
    """A missing program or folder fails that worker, with the reason."""
    with node.spawn(0, *argv, cwd=cwd):
        assert why in (await node.next(Exited)).error


@pytest.mark.skipif(not frozen_fs.IS_HERE, reason="needs /dev/fuse")
async def test_worker_whose_program_is_looked_for_on_a_dead_file_system_delays_no_other(node, tmp_path):
    """A search for a program on a dead file system delays neither another worker nor the stop."""
    with frozen_fs.frozen(tmp_path), node.spawn(0, "true", env={"PATH": str(tmp_path)}), node.spawn(1, "true"):
        assert (await node.next(Exited)).rank == 1
        node.workers.stop(grace_s=0.0)
        assert (await node.next(Stopped)).survivors == ()


async def test_workers_do_not_inherit_ignored_signals(node):
    """The supervisor ignores SIGTERM; its workers do not inherit that."""
    code = "import signal; print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
    with node.spawn(0, sys.executable, "-c", code) as output:
        await node.next(Exited)
        assert output.read() == b"True\n"


async def test_worker_inherits_nothing_but_its_output(node):
    """A worker inherits no socket: an inherited fence socket or connection would hide its supervisor's death."""
    fence_socket = fence.open_fence_socket(fence.key_of("token", "incarnation"), "127.0.0.1")
    node.workers.fence(fence_socket)
    code = "import os; print(sorted(fd for fd in map(int, os.listdir('/proc/self/fd')) if fd > 2))"
    with node.spawn(0, sys.executable, "-S", "-c", code) as output:
        await node.next(Exited)
        assert output.read() == b"[3]\n"  # the listed folder


async def test_workers_die_with_their_supervisor(node):
    """When the supervisor dies, the kernel kills its workers, even while all of them are stopped."""
    with node.spawn(0, "sleep", "1000"):
        pid = (await node.next(Spawned)).pid
        os.kill(pid, signal.SIGSTOP)
        os.kill(node.workers.supervisor_pid, signal.SIGSTOP)
        os.kill(node.workers.supervisor_pid, signal.SIGKILL)
        wait_gone([pid])


async def test_what_no_signal_ends_does_not_hold_the_agent_up(node, monkeypatch):
    """If the supervisor was killed and a process of its worker is in uninterruptible sleep, the agent names that
    process after a bounded time. A signal that is not sent simulates the sleep."""
    monkeypatch.setattr(workers, "KILL_S", 1.0)
    with node.spawn(0, sys.executable, "-c", DETACHING) as output:
        detached = int(output.readline())
        monkeypatch.setattr(supervisor, "send_all", lambda pids, number: None)
        os.kill(node.workers.supervisor_pid, signal.SIGKILL)
        assert await node.next(SupervisorDied) == SupervisorDied(survivors=(detached,))
        os.kill(detached, signal.SIGKILL)


async def test_what_ran_before_the_supervisor_outlives_it(others, node):
    """A process that ran before the supervisor, and what it has started, are no workers and are not killed."""
    with node.spawn(0, "sleep", "1000"):
        pid = (await node.next(Spawned)).pid
        os.kill(node.workers.supervisor_pid, signal.SIGKILL)
        await node.next(SupervisorDied)
        assert not is_alive(pid)
    assert all(map(is_alive, others))


async def test_workers_are_killed_when_their_lease_lapses(node):
    """Workers whose lease was not renewed are killed: another node may have their ranks by now."""
    with node.spawn(0, sys.executable, "-c", STUBBORN) as output:
        pid = (await node.next(Spawned)).pid
        assert await asyncio.to_thread(output.read, 2) == b"up"
        node.workers.lease(0.2)
        assert await node.next(Stopped) == Stopped(survivors=(), lapsed=True)
        assert not is_alive(pid)


async def test_a_worker_whose_main_thread_has_ended_is_killed_too(node):
    """A worker whose main thread has ended, which the kernel shows as a zombie, is killed with its other threads."""
    headless = (
        "import ctypes, os, signal, threading, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "def go_on(): os.write(1, b'up'); time.sleep(30); os.write(1, b'late'); os._exit(0)\n"
        "threading.Thread(target=go_on).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    with node.spawn(0, sys.executable, "-c", headless) as output:
        await node.next(Spawned)
        assert await asyncio.to_thread(output.read, 2) == b"up"
        node.workers.lease(0.2)
        assert await node.next(Stopped) == Stopped(survivors=(), lapsed=True)
        assert await asyncio.to_thread(output.read) == b""


async def test_a_killed_worker_whose_memory_is_being_freed_is_no_survivor(monkeypatch):
    """A killed worker whose memory the kernel still frees is no survivor, even if that takes longer than `KILL_S`,
    which is short here."""
    short = "import nvrx_slurm.agent.teardown as t; t.KILL_S = 0.1; from nvrx_slurm.agent.supervisor import main"
    monkeypatch.setattr(
        workers, "_BOOT", workers._BOOT.replace("from nvrx_slurm.agent.supervisor import main", short)
    )
    large = (
        "import mmap, os, signal\n"
        "held = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "held.madvise(mmap.MADV_NOHUGEPAGE)\n"
        "for at in range(0, 1 << 30, 4096): held[at] = 1\n"
        "os.write(1, b'up'); signal.pause()"
    )
    node = Node()
    with node.spawn(0, sys.executable, "-c", large) as output:
        pid = (await node.next(Spawned)).pid
        assert await asyncio.to_thread(output.read, 2) == b"up"
        node.workers.stop(0.0)
        assert (await node.next(Exited)).signal == signal.SIGKILL
        assert await node.next(Stopped) == Stopped(survivors=())
        assert not is_alive(pid)
    everybody = node.everybody()
    node.workers.close()
    wait_gone(everybody)


async def test_a_file_in_the_current_folder_is_no_module_of_the_supervisor(tmp_path, monkeypatch):
    """The supervisor imports nothing from the current folder: others may be able to write to the folder of the
    submission."""
    (tmp_path / "json.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()")
    monkeypatch.chdir(tmp_path)
    node = Node()
    with node.spawn(0, "true"):
        assert (await node.next(Exited)).code == 0
    everybody = node.everybody()
    node.workers.close()
    wait_gone(everybody)
    assert not (tmp_path / "imported").exists()


async def test_lease_that_is_renewed_kills_no_worker(node):
    """Only the most recent lease counts."""
    with node.spawn(0, "sleep", "1000"):
        await node.next(Spawned)
        node.workers.lease(0.05)
        node.workers.lease(1000.0)
        with pytest.raises(asyncio.TimeoutError):
            await node.next(Exited, timeout=0.3)


async def test_lapsed_lease_is_noticed_first_after_a_freeze(node):
    """After a freeze the supervisor checks the lease first, and kills the workers before it reads newer messages."""
    with node.spawn(0, "sleep", "1000"):
        pid = (await node.next(Spawned)).pid
        node.workers.lease(0.5)
        os.kill(node.workers.supervisor_pid, signal.SIGSTOP)
        await asyncio.sleep(0.6)  # the freeze itself
        node.workers.lease(1000.0)
        with contextlib.suppress(ProcessLookupError):  # after too long a freeze the kernel has killed it
            os.kill(node.workers.supervisor_pid, signal.SIGCONT)
        wait_gone([pid])


async def test_lease_that_waited_for_a_frozen_supervisor_is_no_longer_for_that(node):
    """A lease counts from when it was sent, not from when a frozen supervisor reads it; a later request comes too
    late."""
    node.workers.lease(1000.0)
    with node.spawn(0, "sleep", "1000"):
        pid = (await node.next(Spawned)).pid
        os.kill(node.workers.supervisor_pid, signal.SIGSTOP)
        node.workers.lease(0.3)
        await asyncio.sleep(0.4)  # the freeze itself
        with node.spawn(1, "sleep", "1000"):
            os.kill(node.workers.supervisor_pid, signal.SIGCONT)
            # If the freeze took longer than intended, the kernel ends the supervisor too, as below.
            assert await node.next((Stopped, SupervisorDied)) in (
                Stopped(survivors=(), lapsed=True),
                SupervisorDied(),
            )
        wait_gone([pid])


async def test_nothing_is_started_on_a_lease_that_has_lapsed(node):
    """No worker is started on a lapsed lease: a frozen agent may ask for work that another node does by now. After a
    new lease workers start again."""
    node.workers.lease(0.0)
    with node.spawn(0, "sleep", "1000"):
        assert await node.next(Stopped) == Stopped(survivors=(), lapsed=True)
        assert node.everybody() == [node.workers.supervisor_pid]
    node.workers.lease(1000.0)
    with node.spawn(0, "sleep", "1000"):
        await node.next(Spawned)


async def test_the_kernel_ends_a_frozen_supervisor_whose_lease_lapses(node):
    """If the lease of a stopped supervisor lapses, the kernel kills it, and its workers with it, even while all are
    stopped."""
    with node.spawn(0, "sleep", "1000"):
        pid = (await node.next(Spawned)).pid
        node.workers.lease(2.0)
        with node.spawn(1, "sleep", "1000"):
            await node.next(Spawned)  # so it has read the lease, too
            for each in (node.workers.supervisor_pid, pid):
                os.kill(each, signal.SIGSTOP)
            assert await node.next(SupervisorDied) == SupervisorDied()
            wait_gone([pid])


async def test_worker_is_asked_to_save_first(node):
    """The checkpoint signal comes before the stop signal; a worker that ends on it gets no further signal."""
    with node.spawn(0, sys.executable, "-c", SAVING) as output:
        await node.next(Spawned)
        assert await asyncio.to_thread(output.read, 2) == b"up"
        node.workers.stop(20.0, checkpoint=(signal.SIGUSR1, 20.0))
        assert (await node.next(Exited)).code == 0
        assert output.read() == b"saved"


async def test_dump_is_asked_for_before_any_worker_is_killed(node):
    """The stacks of a worker that outlasts the stop signal are dumped; once they are, the teardown goes on."""
    with node.spawn(0, sys.executable, "-c", STUBBORN) as output:
        await node.next(Spawned)
        assert await asyncio.to_thread(output.read, 2) == b"up"
        node.workers.stop(grace_s=10.0)
        while (await node.next(Tearing)).phase != "dump":
            pass
        node.workers.phase_done("dump")
        assert (await node.next(Tearing)).phase == "terminate"
        assert await node.next(Stopped) == Stopped(survivors=())


async def test_descendants_get_the_rest_of_the_grace(node):
    """If a shell dies of SIGTERM and leaves its program behind, that program is asked to end too, and has the rest of
    the grace."""
    script = f"{sys.executable} -c '{SAVING_ON_TERM}' & wait"
    with node.spawn(0, "bash", "-c", script) as output:
        await node.next(Spawned)
        assert await asyncio.to_thread(output.read, 2) == b"up"
        node.workers.stop(grace_s=20.0)
        await node.next(Stopped)
        assert output.read() == b"saved"


async def test_stop_kills_a_worker_that_ignores_sigterm(node):
    """A worker that ignores SIGTERM gets SIGKILL after the grace, and `Stopped` names no survivor."""
    with node.spawn(0, sys.executable, "-c", STUBBORN) as output:
        pid = (await node.next(Spawned)).pid
        assert await asyncio.to_thread(output.read, 2) == b"up"
        node.workers.stop(grace_s=0.1)
        assert await node.next(Stopped) == Stopped(survivors=())
        assert not is_alive(pid)


async def test_stop_reaches_every_descendant(node):
    """Fifty children of a worker end with it."""
    with node.spawn(0, sys.executable, "-c", FORKING) as output:
        await node.next(Spawned)
        assert await asyncio.to_thread(output.read, 2) == b"up"
        assert len(node.everybody()) == 52
        node.workers.stop(grace_s=5.0)
        await node.next(Stopped)
        assert node.everybody() == [node.workers.supervisor_pid]


async def test_stopped_process_is_woken_to_end(node):
    """A worker stopped by SIGSTOP is continued, and runs its own handler of SIGTERM within the grace."""
    with node.spawn(0, sys.executable, "-S", "-c", SAVING_ON_TERM) as output:
        pid = (await node.next(Spawned)).pid
        assert await asyncio.to_thread(output.read, 2) == b"up"
        os.kill(pid, signal.SIGSTOP)
        node.workers.stop(grace_s=10.0)
        ended = await node.next(Exited)
        assert ended == Exited(rank=0, code=0, at=ended.at, sent=frozenset({signal.SIGTERM}))
        await node.next(Stopped)


async def test_stop_without_workers_answers_at_once(node):
    """A stop is answered even if there are no workers."""
    node.workers.stop(grace_s=100.0)
    assert await node.next(Stopped, timeout=5.0) == Stopped(survivors=())


async def test_the_end_of_many_workers_is_reported(node):
    """Sixty-four workers start and end, and the end of each is reported."""
    outputs = [node.spawn(rank, "true") for rank in range(64)]
    ended = {(await node.next(Exited)).rank for _ in range(64)}
    assert ended == set(range(64))
    for output in outputs:
        output.close()


async def test_warm_process_that_cannot_start_says_why(node):
    """The reason is the last line of its standard error, here about a missing folder."""
    node.workers.warm("main", ["sleep", "1"], {}, "/no/folder", [])
    said = "it exited with code 127: No such file or directory: /no/folder"
    assert await node.next(WarmSaid) == WarmSaid("main", ("ended", said))


async def test_warm_process_that_never_runs_its_program_does_not_hold_the_workers_up(node, tmp_path):
    """A warm process on a dead file system delays no worker and no stop. Here execve waits for a lease of the file
    (fcntl(2)), for 45 s at most."""
    program = tmp_path / "program"
    program.touch(0o755)
    leased = os.open(program, os.O_RDWR)
    asked = signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        node.workers.warm("main", [str(program)], {}, "/", [])
        with node.spawn(0, "true"):
            assert (await node.next(Exited)).code == 0
        node.workers.cool("main")
        node.workers.stop(grace_s=0.0)
        assert (await node.next(Stopped)).survivors == ()
    finally:
        os.close(leased)
        signal.signal(signal.SIGIO, asked)


async def test_order_that_is_too_large_does_not_hold_the_agent_up(node):
    """The caller of an order that is too large gets an error, and the agent goes on to read its workers' events
    without blocking."""
    reading, writing = os.pipe()
    os.close(reading)
    with node.spawn(0, "sleep", "1000"):
        pid = (await node.next(Spawned)).pid
        node.workers.run_command("r", ["x" * (32 << 20)], {}, pid, writing, os.dup(2))
        assert (await node.next(CommandExited)).end.error == "it is too large"
        node.workers.warm("main", ["true"], {"NAME": "x" * (32 << 20)}, "/", [])
        assert await node.next(WarmSaid) == WarmSaid(
            "main", ("failed", "its environment and list of imports are too large")
        )
        os.kill(pid, signal.SIGKILL)
        # Ends a wait that would block the event loop, and with it this test, for ever.
        watchdog = threading.Timer(15.0, os.kill, (node.workers.supervisor_pid, signal.SIGKILL))
        watchdog.start()
        try:
            assert (await node.next(Exited)).signal == signal.SIGKILL
            assert is_alive(node.workers.supervisor_pid)
        finally:
            watchdog.cancel()


async def test_closing_ends_every_process(node):
    """When the agent closes its socket to the supervisor, no process of the node is left."""
    with node.spawn(0, sys.executable, "-c", STUBBORN) as output:
        await asyncio.to_thread(output.read, 2)
        everybody = node.everybody()
        node.workers.close()
        wait_gone(everybody)


@pytest.fixture
async def left_behind(node):
    """A worker's process that has left the worker's session, and lost its parent."""
    with node.spawn(0, sys.executable, "-S", "-c", DETACHING) as output:
        worker = (await node.next(Spawned)).pid
        pid = int(await asyncio.to_thread(output.readline))
        assert os.getsid(pid) not in (worker, os.getsid(node.workers.supervisor_pid))
        yield pid
        send_all([pid], signal.SIGKILL)  # if the test fails


async def test_what_left_its_session_ends_with_the_agent(node, left_behind):
    """When the agent's end of the socket closes, as at the agent's death, the supervisor kills all processes below
    it."""
    node.workers.close()
    wait_gone([left_behind])


async def test_what_left_its_session_ends_with_the_lease(node, left_behind):
    """When the lease lapses, no process of a worker is left that could occupy its GPU or write its files."""
    node.workers.lease(0.05)
    assert await node.next(Stopped) == Stopped(survivors=(), lapsed=True)
    assert not is_alive(left_behind)


async def test_what_left_its_session_ends_with_the_stop(node, left_behind):
    """A teardown ends only when no descendant is left."""
    node.workers.stop(grace_s=0.1)
    assert await node.next(Stopped) == Stopped(survivors=())
    assert not is_alive(left_behind)


async def test_what_left_its_session_ends_with_the_supervisor(node, left_behind):
    """The kernel kills the worker; the agent inherits the other processes, and kills them."""
    os.kill(node.workers.supervisor_pid, signal.SIGKILL)
    await node.next(SupervisorDied)
    assert not is_alive(left_behind)


async def test_workers_of_a_suspended_job_outlive_their_lease(node):
    """A stopped supervisor survives under a long lease. It reports, once, that an ordinary lease and the kernel's
    timer are in force again."""
    with node.spawn(0, "sleep", "1000"):
        pid = (await node.next(Spawned)).pid
        node.workers.lease(0.3)
        node.workers.lease(14 * 86400.0, grant=3)
        with node.spawn(1, "sleep", "1000"):
            await node.next(Spawned)  # so it has read the second lease
            os.kill(node.workers.supervisor_pid, signal.SIGSTOP)
            await asyncio.sleep(1.2)  # the suspension itself: longer than the first lease and the kernel's margin
            os.kill(node.workers.supervisor_pid, signal.SIGCONT)
            node.workers.lease(1000.0)
            assert await node.next(Released) == Released(grant=3)
            assert is_alive(pid)
            node.workers.lease(0.1)
            assert await node.next((Stopped, Released)) == Stopped(survivors=(), lapsed=True)
