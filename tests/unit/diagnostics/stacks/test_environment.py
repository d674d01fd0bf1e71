"""The variables that bring the hook to a worker."""

from __future__ import annotations

import os

from nvrx_slurm.diagnostics.stacks.environment import HOOK_DIR, hook_environment


def test_hook_comes_first_and_what_was_there_follows(tmp_path):
    """The user's PYTHONPATH stays behind the hook, in its order."""
    env = hook_environment({"PYTHONPATH": os.pathsep.join(["/a", "/b"])}, tmp_path)
    assert env["PYTHONPATH"].split(os.pathsep) == [str(HOOK_DIR), "/a", "/b"]
    assert (HOOK_DIR / "sitecustomize.py").is_file()


def test_hook_is_there_once(tmp_path):
    """An environment that has the hook already does not get it twice, nor an empty part, which means the folder."""
    once = hook_environment({}, tmp_path)
    assert once["PYTHONPATH"] == str(HOOK_DIR)
    assert hook_environment(once, tmp_path) == once


def test_users_choice_of_faulthandler_stays(tmp_path):
    """PYTHONFAULTHANDLER is on, unless the user has said something else, be it nothing."""
    assert hook_environment({}, tmp_path)["PYTHONFAULTHANDLER"] == "1"
    assert hook_environment({"PYTHONFAULTHANDLER": ""}, tmp_path)["PYTHONFAULTHANDLER"] == ""
