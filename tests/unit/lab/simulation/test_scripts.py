"""The environment of the store's Lua scripts, for cases that no real server can show."""

from __future__ import annotations

import sys

import pytest
from click.testing import CliRunner

from nvrx_slurm.cli.ci import simulate
from nvrx_slurm.errors import MissingProgramError
from nvrx_slurm.lab.simulation import valkey_scripts
from nvrx_slurm.lab.simulation.valkey_keyspace import Keyspace
from nvrx_slurm.lab.simulation.valkey_scripts import LuaScripts
from nvrx_slurm.util.clock import SystemClock


def test_simulation_without_lupa_names_the_extra(monkeypatch):
    """The error is one line, with the exit code for a missing program."""
    monkeypatch.setitem(sys.modules, "lupa.lua51", None)
    valkey_scripts.lua_scripts.cache_clear()
    with pytest.raises(MissingProgramError, match=r"pip install 'nvrx-slurm\[ci\]'") as refused:
        CliRunner().invoke(simulate, ["--seeds", "1"], standalone_mode=False, catch_exceptions=False)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


def test_defect_of_a_command_is_no_error_that_a_script_can_catch(monkeypatch):
    """A defect of the simulation ends the run: a script cannot take it for an answer of the server."""
    monkeypatch.setitem(valkey_scripts.COMMANDS, b"GET", (1, 1, lambda data, key: 1 // 0))
    scripts = LuaScripts()
    _, script = scripts.compile(b"return redis.pcall('GET', 'k')")
    with pytest.raises(ZeroDivisionError):
        scripts.run(script, Keyspace(SystemClock(), lambda key: None), [], [])


def test_script_is_compiled_once():
    """A second server that loads the script gets the same one."""
    scripts = LuaScripts()
    assert scripts.compile(b"return 1") == scripts.compile(b"return 1")
