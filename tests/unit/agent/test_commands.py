"""Users' commands that run beside a worker: real processes below a real supervisor."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from nvrx_slurm.agent.workers import CommandExited, Exited, Spawned, Stopped
from nvrx_slurm.journal.commands import CommandEnd
from nvrx_slurm.util.processes import is_alive
from tests import frozen_fs
from tests.harness import wait_gone
from tests.unit.agent.test_workers import Node

DEAF = (
    "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "os.write(1, b'%d\\n' % os.getpid()); signal.pause()"
)


@pytest.fixture
async def node():
    node = Node()
    yield node
    everybody = node.everybody()
    node.workers.close()
    wait_gone(everybody)


async def worker(node, *argv, cwd="/"):
    """Start a worker and wait until it runs; returns its process id."""
    with node.spawn(0, *argv, cwd=cwd) as out:
        pid = (await node.next(Spawned)).pid
        assert out.read(2) == b"up"
    return pid


def run(node, beside, *argv, env=None):
    """Run a command beside the worker; returns a stream of its standard output."""
    reading, writing = os.pipe()
    node.workers.run_command("r1", argv, env or {}, beside, writing, os.dup(2))
    return os.fdopen(reading, "rb")


async def end_of(node) -> CommandEnd:
    exited = await node.next(CommandExited)
    assert exited.request == "r1"
    return exited.end


async def test_command_runs_in_the_workers_folder_with_the_environment_that_is_given(node, tmp_path):
    """The command runs in the worker's current folder, not in the one where the worker was started, and with the
    given environment."""
    pid = await worker(node, "sh", "-c", f"cd {tmp_path}; echo up; exec sleep 1000")
    with run(node, pid, "sh", "-c", "pwd; echo $RANK; exit 7", env={"RANK": "3"}) as out:
        assert await end_of(node) == CommandEnd(exit_code=7)
        said = out.read()
    assert said.decode().split() == [str(tmp_path), "3"]


async def test_command_enters_the_workers_container(node, tmp_path):
    """The command gets the mounts and the environment of the worker's container; the agent's variables take
    precedence."""
    up = "export IMAGE=x; exec sh -c 'echo up; exec sleep 1000'"  # /proc shows the environment at exec
    inner = f"mount -t tmpfs none {tmp_path} && echo inside > {tmp_path}/f && {up}"
    pid = await worker(node, "unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inner)
    with run(node, pid, "sh", "-c", f"cat {tmp_path}/f; echo $IMAGE $RANK", env={"RANK": "3"}) as out:
        assert await end_of(node) == CommandEnd(exit_code=0)
        said = out.read()
    assert said.decode().split() == ["inside", "x", "3"]
    assert list(tmp_path.iterdir()) == []


async def test_a_stop_of_the_workers_kills_the_command_at_once(node):
    """A stop kills the command without a grace period: a command that ignores SIGTERM, as shells do, must not delay a
    recovery."""
    pid = await worker(node, "sh", "-c", "echo up; exec sleep 1000")
    with run(node, pid, sys.executable, "-c", DEAF) as out:
        command = int(out.readline())
    node.workers.stop(60.0)
    assert await end_of(node) == CommandEnd(signal=signal.SIGKILL)
    await node.next(Stopped)
    assert not is_alive(command)


async def test_signals_reach_the_command_and_what_it_has_started(node):
    pid = await worker(node, "sh", "-c", "echo up; exec sleep 1000")
    with run(node, pid, "sh", "-c", "sleep 1000 & echo $!; wait") as out:
        child = int(out.readline())
    node.workers.signal_command("r1", signal.SIGTERM)
    assert await end_of(node) == CommandEnd(signal=signal.SIGTERM)
    wait_gone([child])
    assert is_alive(pid), "the worker goes on"


async def test_a_command_that_cannot_run_says_why(node):
    """The error names the missing program, or says that the worker has ended."""
    pid = await worker(node, "sh", "-c", "echo up; exec sleep 1000")
    run(node, pid, "no-such-program").close()
    assert "no-such-program" in ((await end_of(node)).error or "")
    run(node, 1, "true").close()
    assert "ended" in ((await end_of(node)).error or ""), "process 1 is no worker of this node"


@pytest.mark.skipif(not frozen_fs.IS_HERE, reason="needs /dev/fuse")
async def test_command_beside_a_worker_on_a_dead_file_system_delays_no_other_worker(node, tmp_path):
    """A command for a worker on a dead file system delays nothing: other workers are still reaped, and the stop
    completes."""
    with frozen_fs.frozen(tmp_path, answers=True):
        pid = await worker(node, "sh", "-c", "echo up; exec sleep 1000", cwd=str(tmp_path))
        with run(node, pid, "true"), node.spawn(1, "true"):
            assert (await node.next(Exited)).rank == 1
            node.workers.stop(grace_s=0.0)
            assert (await node.next(Stopped)).survivors == ()
