"""The plain page and the coloured one."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from nvrx_slurm.clock import SystemClock
from nvrx_slurm.records import FaultTolerance, Plan, RolePlan
from nvrx_slurm.report import plain, screen, snapshot
from nvrx_slurm.report.overview import list_jobs
from nvrx_slurm.report.snapshot import Snapshot
from tests.unit.report.recorder import Recorder, ended, roles_plan, to_first_cycle, with_one_recovery, write


class _At(SystemClock):
    """A clock that stands still, a second after a journal's last entry."""

    def __init__(self, recorder: Recorder) -> None:
        self._now = recorder.now + 1.0

    def wall(self) -> float:
        return self._now


def shot(tmp_path: Path, recorder: Recorder) -> Snapshot:
    return snapshot.take(write(tmp_path, recorder), live=False, clock=_At(recorder))


def drawn(page: object, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    console.print(page)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_plain_page_is_stable_and_greppable(tmp_path: Path) -> None:
    """The same journal gives the same page: a line for each node, without colours or trailing blanks."""
    page = plain.page(shot(tmp_path, with_one_recovery()))
    assert page == plain.page(shot(tmp_path, with_one_recovery()))
    assert "\x1b" not in page
    assert not any(line != line.rstrip() for line in page.splitlines())
    rows = {line.split()[0]: line.split() for line in page.splitlines() if line}
    assert rows["n2"][:2] == ["n2", "lost"]
    assert rows["n4"][:5] == ["n4", "active", "main-0", "4-5", "76"]
    assert rows["spares"] == ["spares", "1", "of", "2", "left:", "n5"]


def test_a_pages_columns_are_aligned(tmp_path: Path) -> None:
    """Each cell begins, or ends, under its column's name."""
    table = plain.page(shot(tmp_path, to_first_cycle())).split("\n\n")[2].splitlines()
    state = table[0].index("STATE")
    assert [line[state : state + 7].strip() for line in table[1:]] == ["active"] * 4 + ["standby"] * 2


def test_both_pages_say_the_same(tmp_path: Path) -> None:
    """What matters is on the coloured page too: nodes, states, causes, phases, where the logs are."""
    taken = shot(tmp_path, with_one_recovery())
    page = drawn(screen.render(taken), width=200)
    for words in (
        "n2 lost: tether lost",
        "n4 took over",
        "torn down",
        "last told step 80, resumed at 76",
        "972 ms to the first step",
    ):
        assert words in page
    assert str(taken.folder.path / "logs") in page


def test_what_a_job_waits_for_is_at_the_top(tmp_path: Path) -> None:
    """While a round is open, the second line or so says whom it waits for."""
    recorder = to_first_cycle()
    recorder.lose("n2")
    page = drawn(screen.render(shot(tmp_path, recorder)))
    assert "main-0 waits for n[0-1,3] to end old workers" in "\n".join(page.splitlines()[:4])
    assert "waits for n[0-1,3]" in plain.page(shot(tmp_path, recorder))


def test_a_large_fleet_fits_on_a_screen(tmp_path: Path) -> None:
    """Of hundreds of nodes the unusual ones are shown, and the others are counted."""
    role = RolePlan(name="main", command=("x",), nodes_per_replica=500, workers_per_node=8)
    plan = Plan(name="big", roles=(role,), spares=4, workdir="/w", folder="/j", fault_tolerance=FaultTolerance())
    recorder = Recorder(plan)
    recorder.join()
    recorder.start_workers(took_s=0.0)
    recorder.lose("n137")
    page = drawn(screen.render(shot(tmp_path, recorder)))
    assert len(page.splitlines()) < 40
    assert "✗  n137" in page
    assert "active: n[" in page


def test_a_job_with_roles_shows_its_replicas(tmp_path: Path) -> None:
    """Several replicas are a table of their own, each with its phase and cycle."""
    recorder = Recorder(roles_plan())
    recorder.join()
    page = drawn(screen.render(shot(tmp_path, recorder)))
    for replica in ("policy-0", "rollout-0", "rollout-1", "rollout-2"):
        assert replica in page
    assert "starting" in page


def test_the_summary_has_rounds_and_recoveries(tmp_path: Path) -> None:
    """At the end: each cycle, each recovery's phases and total, the way to the first step, where the logs are."""
    taken = shot(tmp_path, ended())
    for page in (drawn(screen.summary(taken), width=200), plain.summary(taken)):
        assert "completed" in page
        assert "172 ms" in page
        assert "972 ms" in page
        assert "n[0-1,4,3]" in page
        assert str(taken.folder.path / "logs") in page


def test_markup_in_names_is_only_text(tmp_path: Path) -> None:
    """Square brackets in a job's name or cause are printed, not taken for colours."""
    recorder = Recorder(Plan(**{**_fields(roles_plan()), "name": "[red]x[/red]"}))
    recorder.join()
    assert "[red]x[/red]" in drawn(screen.render(shot(tmp_path, recorder)))


def test_a_pending_job_says_so_on_both_pages(tmp_path: Path) -> None:
    """A job that has not started has a page: pending, and why."""
    folder = write(tmp_path, Recorder(roles_plan(), start=False))
    (folder.path / "job.json").unlink()
    taken = snapshot.take(folder)
    assert "pending" in plain.page(taken)
    assert "pending" in drawn(screen.render(taken))


def test_the_table_of_jobs_has_a_line_for_each(tmp_path: Path) -> None:
    """All jobs of a folder, a line each, under the column names."""
    write(tmp_path, ended(), job="first")
    write(tmp_path, to_first_cycle(), job="second")
    lines = plain.jobs(list_jobs(tmp_path)).splitlines()
    assert lines[0].split() == ["JOB", "NAME", "CLUSTER", "STATE", "NODES", "CYCLE", "RESTARTS", "STEP", "AGE"]
    assert {line.split()[0]: line.split()[3] for line in lines[1:]} == {"first": "completed", "second": "running"}


def _fields(plan: Plan) -> dict[str, object]:
    return {name: getattr(plan, name) for name in plan.__struct_fields__}
