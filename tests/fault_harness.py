"""Real faults for flow tests: a small disk, a frozen node, a kernel that refuses what the fence needs."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from nvrx_slurm.agent.supervisor import descendants, send_all
from nvrx_slurm.errors import NvrxError
from nvrx_slurm.lab.faults.disk import SmallDisk
from tests.harness import RunningJob
from tests.waiting import until

_T = TypeVar("_T")

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_SECCOMP_ALLOW, _SECCOMP_ERRNO = 0x7FFF0000, 0x00050000
_SETSOCKOPT = {"x86_64": 54, "aarch64": 208}
_SO_ATTACH_FILTER = 26


def child_of(pid: int, words: str) -> int:
    """Wait for a descendant whose command line contains `words`, and return its pid."""

    def look() -> int | None:
        for child in descendants(pid):
            with contextlib.suppress(OSError):
                if words in Path(f"/proc/{child}/cmdline").read_text().replace("\0", " "):
                    return child
        return None

    found = until(look, f"{pid} has no {words!r}")
    assert found is not None
    return found


def supervisor_of(agent: int) -> int:
    return child_of(agent, "agent.supervisor")


class FrozenNode:
    """A local node whose processes have all been stopped (SIGSTOP), parents first."""

    def __init__(self, job: RunningJob, node: str) -> None:
        self.agent = job.agent_pid(node)
        self.supervisor = supervisor_of(self.agent)
        self.workers = [pid for pid in descendants(self.agent) if pid != self.supervisor]
        send_all([self.agent, self.supervisor, *self.workers], signal.SIGSTOP)

    def thaw(self, order: tuple[str, ...] = ("agent", "supervisor", "workers")) -> None:
        """Send SIGCONT to each of them in this order."""
        pids = {"agent": [self.agent], "supervisor": [self.supervisor], "workers": self.workers}
        for name in order:
            send_all(pids[name], signal.SIGCONT)


@contextlib.contextmanager
def small_disk(options: str) -> Iterator[SmallDisk]:
    """A disk with these mount options (`size=1m`). The test is skipped where the kernel does not let us mount one."""
    try:
        disk = SmallDisk(options)
    except NvrxError as error:
        pytest.skip(str(error))
    yield disk
    disk.close()


def without_socket_filters(start: Callable[[], _T]) -> _T:
    """Call `start` where the kernel refuses SO_ATTACH_FILTER, as a container's seccomp profile may: no process that
    it starts can open a fence socket.

    The call runs in a thread of its own: the restriction applies to a thread, is inherited by its children, and
    cannot be undone.
    """
    result: list[_T] = []

    def confined() -> None:
        _refuse_socket_filters()
        result.append(start())

    thread = threading.Thread(target=confined)
    thread.start()
    thread.join()
    return result[0]


def _refuse_socket_filters() -> None:
    """Install a seccomp filter (linux/seccomp.h): setsockopt with this option fails with EPERM, everything else is
    allowed."""
    number = _SETSOCKOPT[platform.machine()]
    load, jump_if_equal, give = 0x20, 0x15, 0x06
    option_at = 16 + 8 * 2  # the third argument in struct seccomp_data, on a little-endian machine
    program = [
        (load, 0, 0, 0),
        (jump_if_equal, 0, 3, number),
        (load, 0, 0, option_at),
        (jump_if_equal, 0, 1, _SO_ATTACH_FILTER),
        (give, 0, 0, _SECCOMP_ERRNO | 1),
        (give, 0, 0, _SECCOMP_ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    described = ctypes.create_string_buffer(struct.pack("HL", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for words in ((_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described)):
        if libc.prctl(*words, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
