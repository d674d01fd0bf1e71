"""The fence: the kernel ends a node's processes although none of them can run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from nvrx_slurm.controller.environment import is_dead
from nvrx_slurm.liveness import fence
from tests.harness import wait_gone

KEY = fence.key_of("token", "incarnation")
# Owns an armed fence socket, and starts a child that dies with it; prints the child's pid.
HOLDER = """
import ctypes, os, signal, sys
from nvrx_slurm.agent import supervisor
for descriptor in map(int, sys.argv[1:]):
    os.set_inheritable(descriptor, False)
supervisor.arm(int(sys.argv[1]))
if os.fork() == 0:
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
    print(os.getpid(), flush=True)
    os.execvp("sleep", ["sleep", "1000"])
signal.pause()
"""


class Node:
    """A process that owns the fence socket of `KEY`, and its child."""

    def __init__(self) -> None:
        fence_socket = fence.open_fence_socket(KEY, "127.0.0.1")
        self.port = fence_socket.getsockname()[1]
        argv = [sys.executable, "-c", HOLDER, *map(str, fence_socket.filenos())]
        self.process = subprocess.Popen(argv, pass_fds=fence_socket.filenos(), stdout=subprocess.PIPE)
        fence_socket.close()
        assert self.process.stdout is not None
        self.child = int(self.process.stdout.readline())
        self.process.stdout.close()


@pytest.fixture
def node():
    node = Node()
    yield node
    node.process.kill()
    node.process.wait()
    wait_gone([node.child])


async def test_key_kills_a_frozen_node_and_proves_it(node):
    """All processes of the node are stopped; the kernel kills them, and then refuses connections, which proves the
    death."""
    for pid in (node.child, node.process.pid):
        os.kill(pid, signal.SIGSTOP)
    assert await is_dead("127.0.0.1", node.port, KEY, 10.0)
    assert node.process.wait() == -signal.SIGKILL
    wait_gone([node.child])


async def test_probe_kills_no_process(node):
    """A living node does not answer a probe, and keeps running."""
    assert not await is_dead("127.0.0.1", node.port, fence.PROBE, 0.1)
    assert node.process.poll() is None


@pytest.mark.parametrize("message", [b"", b"x" * 32, KEY[:-1], KEY + b"x", KEY[:-4] + b"abcd", b"abcd" + KEY[4:]])
async def test_only_the_key_kills(node, message):
    """The kernel drops a port scan, a wrong key, and a key of the wrong length."""
    assert not await is_dead("127.0.0.1", node.port, message, 0.05)
    assert node.process.poll() is None


async def test_death_by_any_cause_is_proven(node):
    """The kernel closes the fence socket when the process that owns it ends."""
    node.process.kill()
    assert await is_dead("127.0.0.1", node.port, fence.PROBE, 10.0)


def test_each_agent_has_a_key_of_its_own():
    """Two agents of one job have different keys, so the key of a replaced agent does not kill the next one."""
    assert fence.key_of("token", "other") != KEY
    assert len(KEY) == 32


async def test_connections_to_the_fence_socket_do_not_exhaust_it(node):
    """The fence socket accepts no connection. With a full backlog the node lives on, and its death is still
    proven."""
    held = []
    for _ in range(fence.BACKLOG + 8):
        held.append(socket.socket())
        held[-1].setblocking(False)
        held[-1].connect_ex(("127.0.0.1", node.port))
    assert not await is_dead("127.0.0.1", node.port, fence.PROBE, 0.1)
    node.process.kill()
    assert await is_dead("127.0.0.1", node.port, fence.PROBE, 10.0)
    for each in held:
        each.close()


def test_fence_socket_listens_at_one_address_only():
    """Other hosts cannot reach the fence socket of a local job."""
    fence_socket = fence.open_fence_socket(KEY, "127.0.0.1")
    for descriptor in fence_socket.filenos():
        with socket.socket(fileno=os.dup(descriptor)) as each:
            assert each.getsockname()[0] == "127.0.0.1"
            assert each.family == socket.AF_INET
    fence_socket.close()
