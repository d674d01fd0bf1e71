"""What code that was written for `nvidia_resiliency_ext.inprocess` imports."""

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


def test_the_restart_is_where_older_code_catches_it():
    """`inprocess.monitor_thread.RankShouldRestart` is the one that is raised, not another of that name."""
    assert inprocess.monitor_thread.RankShouldRestart is inprocess.RankShouldRestart


def test_a_state_is_made_of_rank_and_world_size():
    """By position, as in older tests of rank assignments; what it began with is known from them, too."""
    state = inprocess.State(1, 4)
    assert (state.rank, state.world_size, state.initial_rank, state.initial_world_size) == (1, 4, 1, 4)


def test_a_users_store_finds_its_base_class_by_the_older_path():
    """`inprocess.store.port` is where `Store` was; it is the same class."""
    assert importlib.import_module("nvrx_slurm.inprocess.store.port").Store is inprocess.Store


def test_every_public_name_is_there():
    """All that the package lists can be had from it."""
    assert [name for name in inprocess.__all__ if not hasattr(inprocess, name)] == []


def test_a_torch_store_without_torch_says_what_to_do():
    """One line that names torch and the stores that need none."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert "TCPStore needs torch" in done.stderr
    assert "or use RedisStore or FileStore" in done.stderr.splitlines()[-1]
