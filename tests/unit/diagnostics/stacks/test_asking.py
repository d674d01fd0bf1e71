"""Whom the question may be sent to, while processes come and go."""

from __future__ import annotations

from pathlib import Path

from nvrx_slurm.diagnostics.stacks.asking import Unasked, pose
from nvrx_slurm.diagnostics.stacks.environment import DUMP_SIGNAL


def children_of(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def test_programs_that_are_being_started_are_never_asked(start, dump_dir):
    """Children on their way from fork to exec, asked as fast as can be, are left alone and all end well."""
    worker = start(
        "import subprocess\nprint('up', flush=True)\n"
        "codes = {subprocess.run(['true'], close_fds=fds).returncode for _ in range(100) for fds in (True, False)}\n"
        "raise SystemExit(codes != {0})"
    )
    replies = []
    while worker.poll() is None:
        replies += [pose(child, DUMP_SIGNAL, dump_dir) for child in children_of(worker.pid)]
    assert worker.returncode == 0
    assert replies and set(replies) <= {Unasked.NO_HOOK, Unasked.GONE}
