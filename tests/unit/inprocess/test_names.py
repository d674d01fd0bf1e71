"""The names that code written for `nvidia_resiliency_ext.inprocess` imports."""

from __future__ import annotations

import importlib
import subprocess
import sys

from nvrx_slurm import inprocess

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from nvrx_slurm.inprocess import TCPStore
TCPStore().connect("group", 0)
"""


def test_the_restart_has_the_name_by_which_older_code_catches_it():
    """`inprocess.monitor_thread.RankShouldRestart` is the exception that is raised, not another one with that
    name."""
    assert inprocess.monitor_thread.RankShouldRestart is inprocess.RankShouldRestart


def test_a_state_is_made_of_rank_and_world_size():
    """They are given by position, as in older tests of rank assignments; the initial values are the same."""
    state = inprocess.State(1, 4)
    assert (state.rank, state.world_size, state.initial_rank, state.initial_world_size) == (1, 4, 1, 4)


def test_a_users_store_finds_its_base_class_by_the_older_path():
    """`inprocess.store.port.Store` is the same class as `Store`."""
    assert importlib.import_module("nvrx_slurm.inprocess.store.port").Store is inprocess.Store


def test_every_public_name_is_there():
    """Each name that the package lists can be imported from it."""
    assert [name for name in inprocess.__all__ if not hasattr(inprocess, name)] == []


def test_a_torch_store_without_torch_says_what_to_do():
    """The message is one line that names torch and the stores that do not need it."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert "TCPStore needs torch" in done.stderr
    assert "or use RedisStore or FileStore" in done.stderr.splitlines()[-1]
