"""`workload.restarting`, as the worker's agent sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.workload.slot import Reading, Slot
from tests.unit.workload.test_sections import run

RESTARTING = "from nvrx_slurm.workload.restarting import restarting\nimport time\n"


def reading(code: str, folder: Path) -> Reading:
    """The agent's reading after a worker has run this code."""
    slot = Slot.create(folder / "0.0")
    run(RESTARTING + code, {"NVRX_BEAT_FILE": str(folder / "0.0")})
    told = slot.read()
    slot.close()
    return told


def test_while_it_lasts_a_restart_is_under_way(tmp_path: Path) -> None:
    """It is a section of the main thread with its own bound, and the last beat counts as one before the restart."""
    code = (
        "beat(step=1)\nwith restarting('2m'):\n    told = look()\nprint(told.restarting, told.has_begun, told.open)"
    )
    slot = Slot.create(tmp_path / "0.0")
    said = run(RESTARTING + code, {"NVRX_BEAT_FILE": str(tmp_path / "0.0")})
    assert said.startswith("True False (OpenSection(name='in-process restart'")
    assert "timeout_s=120.0" in said
    slot.close()


def test_after_it_the_worker_has_not_begun_until_it_beats(tmp_path: Path) -> None:
    """The worker's state is as at its start, with the time from which its start-up counts."""
    told = reading("beat(step=1)\nbeat(step=2)\nwith restarting(60): pass", tmp_path)
    assert (told.has_begun, told.restarting, told.beats, told.beats_before) == (False, False, 2, 2)
    assert told.restarted_ns >= told.sign_ns > 0
    assert reading("beat(step=1)\nwith restarting(60): pass\nbeat(step=1)", tmp_path).has_begun


def test_the_silence_around_it_is_not_learned_from(tmp_path: Path) -> None:
    """Before it a rank may have hung, and after it a checkpoint is loaded; later gaps are recorded again."""
    clock = "from nvrx_slurm.workload import board, progress\nnow = 10**15\n"
    clock += "progress.monotonic_ns = board.monotonic_ns = lambda: now\n"
    code = f"{clock}beat(step=1)\nnow += 200\nwith restarting(60): now += 200\nnow += 200\nbeat(step=1)\n"
    assert reading(code, tmp_path).largest_gap_ns == 0
    assert reading(code + "now += 50\nbeat(step=2)", tmp_path).largest_gap_ns == 50


def test_one_that_fails_is_over_as_well(tmp_path: Path) -> None:
    """An exception ends the restart and its section."""
    code = "try:\n    with restarting(60): 1 / 0\nexcept ZeroDivisionError: pass"
    told = reading(code, tmp_path)
    assert (told.restarting, told.open, told.in_section) == (False, (), False)
    assert told.restarted_ns > 0


@pytest.mark.parametrize("environment", [{}, {"NVRX_BEAT_FILE": "/nonexistent"}])
def test_without_an_agent_it_does_nothing(environment: dict[str, str]) -> None:
    """It does nothing under any other launcher."""
    assert run(RESTARTING + "with restarting(60): print('ran')", environment) == "ran\n"
