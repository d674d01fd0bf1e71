"""The environment that installs the hook, and which processes get the signal."""

from __future__ import annotations

import os
from pathlib import Path

from nvrx_slurm.diagnostics.stacks.hook_client import DUMP_SIGNAL, HOOK_DIR, Unasked, hook_environment, pose


def children_of(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def test_programs_that_are_being_started_are_never_asked(start, dump_dir):
    """Children between fork and exec, asked as fast as possible, get no signal and all end well."""
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


def test_hook_comes_first_and_what_was_there_follows(tmp_path):
    """The user's PYTHONPATH follows the hook, in its order."""
    env = hook_environment({"PYTHONPATH": os.pathsep.join(["/a", "/b"])}, tmp_path)
    assert env["PYTHONPATH"].split(os.pathsep) == [str(HOOK_DIR), "/a", "/b"]
    assert (HOOK_DIR / "sitecustomize.py").is_file()


def test_hook_is_there_once(tmp_path):
    """An environment that has the hook does not get it twice, nor an empty part, which would mean the current
    folder."""
    once = hook_environment({}, tmp_path)
    assert once["PYTHONPATH"] == str(HOOK_DIR)
    assert hook_environment(once, tmp_path) == once


def test_users_choice_of_faulthandler_stays(tmp_path):
    """PYTHONFAULTHANDLER is on, unless the user has set it, even to an empty value."""
    assert hook_environment({}, tmp_path)["PYTHONFAULTHANDLER"] == "1"
    assert hook_environment({"PYTHONFAULTHANDLER": ""}, tmp_path)["PYTHONFAULTHANDLER"] == ""
