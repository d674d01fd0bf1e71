"""The screen of `top`: what it shows at 80 × 24, and what keys do to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.report.history import JobTimeline
from nvrx_slurm.report.presence import OutsideState
from nvrx_slurm.report.snapshot import snap
from nvrx_slurm.report.top import Action, Top
from nvrx_slurm.report.view import JobFold
from tests.still_clock import StillClock
from tests.unit.report.recorder import JOB, Recorder, ended, to_first_cycle, write


def shot_of(base: Path, recorder: Recorder, job: str = JOB, *beats: object):
    folder = write(base, recorder, job=job)
    history = JobTimeline(keeps_spans=False)
    fold = JobFold(recorder.plan, [history])
    for item in [*recorder.entries, *beats]:
        fold.take(item)
    clock = StillClock()
    shot = snap(fold.view, folder, outside=OutsideState(), store_now=recorder.now, clock=clock)
    return shot, history.goodput(fold.view)


@pytest.fixture
def two(tmp_path: Path) -> Top:
    """A running job, whose rank 5 lags and is inside a section, and one that has ended."""
    recorder = to_first_cycle()
    beats = [recorder.beat(node, 40, 40) for node in ("n0", "n1", "n3")]
    beats.append(recorder.beat("n2", 40, 31, quiet={4: 0.1, 5: 70.0}, sections={5: (("save", 69.0),)}))
    screen = Top()
    screen.show([shot_of(tmp_path, recorder, "17", *beats), shot_of(tmp_path, ended(), "9")])
    return screen


def text(screen: Top, width: int = 80, height: int = 24) -> list[str]:
    lines = screen.lines(width, height)
    assert len(lines) == height
    assert all(len(line.text) <= width for line in lines)
    return [line.text for line in lines]


def test_all_jobs_fit_a_small_terminal(two: Top) -> None:
    """Each job is shown with its state, and the keys are explained; the cursor can be seen without colours."""
    lines = text(two)
    assert lines[0] == "nvrx-slurm top   2 jobs, 1 live"
    assert lines[3].startswith("> 9 ") or lines[3].startswith("> 17 ")
    assert "enter open" in lines[-1]


def test_a_job_is_opened_and_its_ranks_are_sorted(two: Top) -> None:
    """Sorted by lag, rank 5 is first: nine steps behind, in its section for 69 s. Escape leads back."""
    two.press("/")
    for key in "17":
        two.press(key)
    two.press("enter")
    assert two.press("enter") is None
    assert Path(two.job).name == "17"
    for _ in range(3):
        two.press("s")
    lines = text(two)
    assert "goodput" in lines[1] and "4 active, 2 standby" in lines[1]
    assert lines[4].split()[:5] == [">", "5", "n2", "31", "9"]
    assert "save 1m 09s" in lines[4]
    two.press("esc")
    assert two.mode == "jobs"


def test_two_jobs_of_one_id(tmp_path: Path) -> None:
    """Two clusters may use the same id: each job has its own line."""
    screen = Top()
    screen.show([shot_of(tmp_path / "one", to_first_cycle(), "9"), shot_of(tmp_path / "other", ended(), "9")])
    assert {line[2:].split()[1] for line in text(screen) if line[2:].startswith("9 ")} == {"running", "completed"}


def test_a_rank_is_asked_for_its_stacks_and_its_log(two: Top, tmp_path: Path) -> None:
    """`press` returns the request; the answer fills the screen and can be searched, and escape leads back to the
    ranks."""
    two.mode, two.job = "job", str(tmp_path / "17")
    two.press("down")
    assert two.press("d") == Action("stacks", two.job, "main-0", 1)
    assert two.press("l") == Action("log", two.job, "main-0", 1)
    two.answer(Action("stacks"), "stacks of main-0 rank 1", "Thread 1\n\x1b]0;owned\x07 in step\nlast")
    lines = text(two)
    assert lines[2] == r"\x1b]0;owned\x07 in step"
    for key in ("/", "l", "a", "s", "enter"):
        two.press(key)
    assert text(two)[1] == "last"
    two.press("esc")
    two.press("esc")
    assert two.mode == "job"


def test_an_open_log_is_read_again(two: Top, tmp_path: Path) -> None:
    """It stays at its end unless the user has scrolled up; an answer that arrives after escape opens no page."""
    two.mode, two.job = "job", str(tmp_path / "17")
    log = two.press("l")
    assert log is not None and two.refresh() is None
    two.answer(log, "log", "nothing so far")
    again = two.refresh()
    assert again is not None and again.is_refresh and two.refresh() is None
    lines = [f"line {index}" for index in range(100)]
    two.answer(again, "log", "\n".join(lines))
    assert text(two)[-2] == "line 99"
    two.answer(again, "log", "\n".join([*lines, "line 100"]))
    assert text(two)[-2] == "line 100"
    two.press("home")
    text(two)
    two.answer(again, "log", "\n".join([*lines, "line 100", "line 101"]))
    assert text(two)[1] == "line 0"
    two.press("esc")
    assert two.refresh() is None
    two.answer(again, "log", "late")
    assert two.mode == "job"


def test_a_job_without_heartbeats_shows_its_nodes(tmp_path: Path) -> None:
    """No stacks can be dumped for a job that has ended, and the screen says so."""
    screen = Top()
    screen.show([shot_of(tmp_path, ended())])
    assert any(line.split()[:2] == [">", "n0"] for line in text(screen))
    assert screen.press("d") is None
    assert "no rank is chosen" in text(screen)[-1]


@pytest.mark.parametrize("size", [(20, 5), (80, 24), (300, 100)])
def test_every_key_leaves_a_whole_screen(two: Top, size: tuple[int, int]) -> None:
    """After any keys, at any size, the screen is drawn in full, and q ends it."""
    keys = ["down"] * 30 + [
        "enter",
        "end",
        "up",
        "s",
        "r",
        "pagedown",
        "home",
        "x",
        "l",
        "/",
        "z",
        "enter",
        "enter",
        "esc",
        "esc",
    ]
    for key in keys:
        two.press(key)
        text(two, *size)
    assert two.press("q") == Action("quit")
