"""`nvrx-slurm completion`"""

from __future__ import annotations

import subprocess

import pytest

from nvrx_slurm.errors import EXIT_USAGE
from tests.unit.cli.conftest import Nvrx


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_completes_this_command(nvrx: Nvrx, shell: str) -> None:
    """Each shell's script calls back `nvrx-slurm` by the variable that click listens to."""
    done = nvrx("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"_NVRX_SLURM_COMPLETE={shell}_complete" in done.stdout
    assert "nvrx-slurm" in done.stdout


def test_the_bash_script_parses(nvrx: Nvrx) -> None:
    """bash takes it."""
    script = nvrx("completion", "bash").stdout
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""


def test_the_callback_completes_commands_and_flags(nvrx: Nvrx) -> None:
    """What the script asks for is answered, for commands and for the flags of one."""
    asked = {"_NVRX_SLURM_COMPLETE": "bash_complete"}
    assert nvrx(COMP_WORDS="nvrx-slurm re", COMP_CWORD="1", **asked).stdout == "plain,render\n"
    flags = nvrx(COMP_WORDS="nvrx-slurm render --sp", COMP_CWORD="2", **asked).stdout
    assert flags == "plain,--spares\n"


def test_another_shell_is_refused(nvrx: Nvrx) -> None:
    """The error names the shells that there are."""
    done = nvrx("completion", "tcsh")
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    assert "'bash', 'zsh', 'fish'" in done.stderr
