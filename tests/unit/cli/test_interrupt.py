"""A signal ends a command with 128 + its number, wherever it arrives: Ctrl-C with 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from nvrx_slurm.api import user_request
from nvrx_slurm.cli import cli
from nvrx_slurm.journal.folder import StoreAddress
from nvrx_slurm.report import snapshot
from tests.unit.report.recorder import JOB, to_first_cycle, write

# What a dataclass does when its module is imported: the interrupt ends an exec() of a string.
INTERRUPTED = """
import sys
import click
from nvrx_slurm import cli
cli.cli.get_command = lambda ctx, name: click.Command(name, callback=lambda: exec("raise KeyboardInterrupt"))
sys.argv = ["nvrx-slurm", "wait"]
cli.main()
"""

# SIGTERM arrives after the lock of an Event is taken, or just before the command begins to wait for it.
TERMINATED = """
import os
import signal
import sys
from nvrx_slurm import cli

def terminate(frame, event, arg):
    is_there = event == "c_call" and frame.f_code.co_qualname in ("Condition.wait", "RecordedSignals.wait")
    if is_there and signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGTERM)

sys.setprofile(terminate)
cli.main()
"""


def test_an_interrupt_during_an_import_exits_with_130(tmp_path: Path) -> None:
    """CPython itself would end a module that `python -m` has started by SIGINT."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    done = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (130, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_controller_answers_exec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """`exec` ends with 128 + its number."""
    folder = write(tmp_path, to_first_cycle())
    shot = replace(snapshot.take(folder), state="running")
    monkeypatch.setattr(snapshot, "take", lambda *_, **__: shot)
    folder.write_store(StoreAddress(url="redis://127.0.0.1:1", job=JOB, token="t"))
    monkeypatch.setattr(user_request, "post", lambda *_: os.kill(os.getpid(), number))
    argv = ["exec", JOB, f"--folder={tmp_path}", "--rank=0", "--", "true"]
    done = CliRunner().invoke(cli, argv, standalone_mode=False)
    assert done.return_value == 128 + number, done.exception


def test_sigterm_as_metrics_begins_to_wait(tmp_path: Path) -> None:
    """`metrics --listen` ends with 0, and does not hang."""
    write(tmp_path, to_first_cycle())
    argv = ["metrics", JOB, "--listen=127.0.0.1:0", f"--folder={tmp_path}"]
    done = subprocess.run([sys.executable, "-c", TERMINATED, *argv], capture_output=True, text=True, timeout=30.0)
    assert done.returncode == 0, done.stderr
