"""What /proc says of processes."""

from __future__ import annotations

import os
import sys

import pytest

from nvrx_slurm.diagnostics.stacks.process import LONGEST_CMDLINE, MOST_FILES, describe, describe_syscall


def test_own_process_is_described():
    """Every field of a process that may be read has a value."""
    state = describe(os.getpid())
    assert state is not None
    assert (state.pid, state.state) == (os.getpid(), "R")
    assert state.threads >= 1 and sum(count for _, count in state.waiting) == state.threads
    assert state.cmdline.startswith(sys.executable) or "python" in state.cmdline
    assert state.open_files
    assert state.text().endswith("\n")


def test_ended_process_is_none(start):
    """A process that is gone, and a zombie, have no state."""
    assert describe(2**22 - 1) is None
    process = start("print('up', flush=True)")
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert describe(process.pid) is None


def test_what_is_long_is_cut(start):
    """Command lines and lists of files are bounded, and show that they were cut."""
    process = start(
        "import os, signal; files = [os.dup(0) for _ in range(200)]; print('up', flush=True); signal.pause()"
        + "#" * 1000
    )
    state = describe(process.pid)
    assert len(state.cmdline) == LONGEST_CMDLINE + len(" ...")
    assert len(state.open_files) == MOST_FILES + 1
    assert state.open_files[-1].startswith("... and ")


@pytest.mark.parametrize(
    ("line", "machine", "said"),
    [
        ("0 0x3 0x7f 0x2000 0x0 0x0 0x73 0x7ffd 0x7f6e\n", "x86_64", "read(0x3, 0x7f, 0x2000, 0x0, 0x0, 0x73)"),
        ("98 0x1 0x0 0x0 0x0 0x0 0x0 0x7ffd 0x7f6e", "aarch64", "futex(0x1, 0x0, 0x0, 0x0, 0x0, 0x0)"),
        ("running", "x86_64", "running"),
        ("-1 0x7ffd 0x7f6e", "x86_64", "none (blocked in the kernel)"),
        ("999 0x1 0x7ffd 0x7f6e", "x86_64", "999 0x1 0x7ffd 0x7f6e"),
        ("0 0x3 0x7ffd 0x7f6e", "riscv64", "0 0x3 0x7ffd 0x7f6e"),
    ],
)
def test_system_calls_have_names(line, machine, said):
    """The common calls are named, by architecture; any other line stays as it is."""
    assert describe_syscall(line, machine) == said
