"""The plain page and the coloured one."""

from __future__ import annotations

import io
import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal.records import NodeJoined, Prewarmed, PrewarmFailed, SlurmNodeState, WorkersDone
from nvrx_slurm.lab.plans import plain_bounds
from nvrx_slurm.report import plain, screen, snapshot
from nvrx_slurm.report.model import ReceivedHeartbeat
from nvrx_slurm.report.page import job_table, my_job_table, nodes
from nvrx_slurm.report.presence import OutsideState
from nvrx_slurm.report.snapshot import Snapshot, list_jobs
from nvrx_slurm.report.view import JobFold
from nvrx_slurm.util.clock import SystemClock
from tests.unit.report.recorder import Recorder, ended, roles_plan, to_first_cycle, with_one_recovery, write


class _At(SystemClock):
    """A clock that stands still, one second after a journal's last entry."""

    def __init__(self, recorder: Recorder) -> None:
        self._now = recorder.now + 1.0

    def wall(self) -> float:
        return self._now


def shot(tmp_path: Path, recorder: Recorder) -> Snapshot:
    return snapshot.take(write(tmp_path, recorder), live=False, clock=_At(recorder))


def live_shot(tmp_path: Path, recorder: Recorder, *beats: ReceivedHeartbeat) -> Snapshot:
    """A running job: its store has these heartbeats, and the store's clock is 0.4 s ahead of the last entry."""
    fold = JobFold(recorder.plan)
    for item in [*recorder.entries, *beats]:
        fold.take(item)
    folder, store_now = write(tmp_path, recorder), recorder.now + 0.4
    return snapshot.snap(fold.view, folder, outside=OutsideState(), store_now=store_now, clock=_At(recorder))


def drawn(page: object, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    console.print(page)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_plain_page_is_stable_and_greppable(tmp_path: Path) -> None:
    """The same journal gives the same page, with a line for each node and without colours or trailing blanks."""
    page = plain.page(shot(tmp_path, with_one_recovery()))
    assert page == plain.page(shot(tmp_path, with_one_recovery()))
    assert "\x1b" not in page
    assert not any(line != line.rstrip() for line in page.splitlines())
    rows = {line.split()[0]: line.split() for line in page.splitlines() if line}
    assert rows["n2"][:2] == ["n2", "lost"]
    assert rows["n4"][:5] == ["n4", "active", "main-0", "4-5", "76"]
    assert rows["spares"] == ["spares", "1", "of", "2", "left:", "n5"]


def test_nodes_of_replicas_that_are_done_are_spares_beyond_those_of_the_plan(tmp_path: Path) -> None:
    """Two of three rollouts are done, and the plan has one spare: the page shows three spares, and not 'of one'."""
    recorder = Recorder(roles_plan())
    recorder.join()
    for replica in ("policy-0", "rollout-0", "rollout-1", "rollout-2"):
        recorder.start_workers(replica)
    for replica in ("rollout-0", "rollout-1"):
        (node,) = recorder.job.replicas[replica].order
        recorder.tell(WorkersDone(**recorder.agent(node), replica=replica, cycle=0, step=1))
        recorder.ready(replica)
    page = plain.page(shot(tmp_path, recorder))
    rows = {line.split()[0]: line.split() for line in page.splitlines() if line}
    assert rows["spares"][:3] == ["spares", "3", "left:"]


def test_a_pages_columns_are_aligned(tmp_path: Path) -> None:
    """Each cell is aligned to the left or right edge of its column's name."""
    table = plain.page(shot(tmp_path, to_first_cycle())).split("\n\n")[2].splitlines()
    state = table[0].index("STATE")
    assert [line[state : state + 7].strip() for line in table[1:]] == ["active"] * 4 + ["standby"] * 2


def test_both_pages_say_the_same(tmp_path: Path) -> None:
    """The coloured page also has nodes, states, causes, phases, and the folder of the logs."""
    taken = shot(tmp_path, with_one_recovery())
    page = drawn(screen.render(taken), width=200)
    for words in (
        "n2 lost: connection to its agent closed",
        "n4 took over",
        "torn down",
        "failed at step 80, resumed from step 76: 5 steps lost",
        "975 ms to the first step",
    ):
        assert words in page
    assert str(taken.folder.path / "logs") in page


def test_where_warm_processes_wait_and_where_workers_start_cold(tmp_path: Path) -> None:
    """One row has the nodes for each reason; it leaves out a node that is gone or whose agent was replaced."""
    recorder = to_first_cycle()
    for node in ("n0", "n1", "n2", "n3", "n4"):
        recorder.tell(Prewarmed(**recorder.agent(node), role="main", modules=800))
    recorder.tell(PrewarmFailed(**recorder.agent("n5"), role="main", why="import of ray starts 3 threads"))
    recorder.tell(PrewarmFailed(**recorder.agent("n3"), role="main", why="it has died"))
    recorder.lose("n2")
    taken = shot(tmp_path, recorder)
    said = "a warm process on n[0-1,4]; cold on n3: it has died; cold on n5: import of ray starts 3 threads"
    assert said in plain.page(taken)
    assert said in drawn(screen.render(taken), width=200)
    prewarm = {
        node["name"]: node["prewarm"]
        for node in msgspec.json.decode(msgspec.json.encode(snapshot.as_status(taken)))["nodes"]
    }
    assert (prewarm["n0"], prewarm["n3"]) == ({"main": None}, {"main": "it has died"})


def test_the_last_recovery_is_shown_up_to_the_first_step(tmp_path: Path) -> None:
    """Both pages and the JSON have its phases and how its workers started."""
    recorder = to_first_cycle()
    recorder.lose("n2")
    recorder.ready()
    recorder.start_workers(warm=2)
    recorder.progress(76)
    taken = shot(tmp_path, recorder)
    assert "first step after 975 ms: decided 2.0 ms, torn down 90.0 ms" in plain.page(taken)
    assert "8 workers warm" in drawn(screen.render(taken), width=200)
    (each,) = msgspec.json.decode(msgspec.json.encode(snapshot.as_status(taken)))["recoveries"]
    assert (each["warm"], each["cold"], each["last_to_step"]) == (8, None, "n3")


def test_what_a_job_waits_for_is_at_the_top(tmp_path: Path) -> None:
    """While a rendezvous is open, one of the first lines names the nodes that it waits for."""
    recorder = to_first_cycle()
    recorder.lose("n2")
    page = drawn(screen.render(shot(tmp_path, recorder)))
    assert "main-0 waits for n[0-1,3] to end old workers" in "\n".join(page.splitlines()[:4])
    assert "waits for n[0-1,3]" in plain.page(shot(tmp_path, recorder))


def test_a_large_fleet_fits_on_a_screen(tmp_path: Path) -> None:
    """Of hundreds of nodes the page lists those in an unusual state, and counts the others."""
    role = RolePlan(name="main", command=("x",), nodes_per_replica=500, workers_per_node=8)
    plan = Plan(name="big", roles=(role,), spares=4, workdir="/w", folder="/j", fault_tolerance=plain_bounds())
    recorder = Recorder(plan)
    recorder.join()
    recorder.start_workers(took_s=0.0)
    recorder.lose("n137")
    page = drawn(screen.render(shot(tmp_path, recorder)))
    assert len(page.splitlines()) < 40
    assert "✗  n137" in page
    assert "active: n[" in page


def test_a_job_with_roles_shows_its_replicas(tmp_path: Path) -> None:
    """Several replicas have a table of their own, with the phase and cycle of each."""
    recorder = Recorder(roles_plan())
    recorder.join()
    page = drawn(screen.render(shot(tmp_path, recorder)))
    for replica in ("policy-0", "rollout-0", "rollout-1", "rollout-2"):
        assert re.search(rf"\b{replica} +starting +0 ", page)


def test_the_summary_has_rounds_and_recoveries(tmp_path: Path) -> None:
    """At the end the page has each cycle, each recovery's phases and total, the time to the first step, and the
    folder of the logs."""
    taken = shot(tmp_path, ended())
    for page in (drawn(screen.summary(taken), width=200), plain.summary(taken)):
        assert "completed" in page
        assert "172 ms" in page
        assert "975 ms" in page
        assert "n[0-1,4,3]" in page
        assert str(taken.folder.path / "logs") in page


def test_markup_in_names_is_only_text(tmp_path: Path) -> None:
    """Square brackets in a job's name or cause are printed as text, not taken for markup."""
    recorder = Recorder(Plan(**{**_fields(roles_plan()), "name": "[red]x[/red]"}))
    recorder.join()
    assert "[red]x[/red]" in drawn(screen.render(shot(tmp_path, recorder)))


def test_a_pending_job_says_so_on_both_pages(tmp_path: Path) -> None:
    """The page of a job that has not started says that it is pending, and why."""
    folder = write(tmp_path, Recorder(roles_plan(), start=False))
    (folder.path / "job.json").unlink()
    taken = snapshot.take(folder)
    assert "pending" in plain.page(taken)
    assert "pending" in drawn(screen.render(taken))


def test_the_table_of_jobs_has_a_line_for_each(tmp_path: Path) -> None:
    """All jobs of a folder have a line each, below the column names."""
    write(tmp_path, ended(), job="first")
    write(tmp_path, to_first_cycle(), job="second")
    lines = plain.table(job_table(list_jobs(tmp_path))).splitlines()
    assert lines[0].split() == ["JOB", "NAME", "CLUSTER", "STATE", "NODES", "CYCLE", "RESTARTS", "STEP", "AGE"]
    assert {line.split()[0]: line.split()[3] for line in lines[1:]} == {"first": "completed", "second": "running"}


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_no_id_and_no_number_is_broken(tmp_path: Path, width: int) -> None:
    """On a narrow terminal long texts are wrapped; where they have no room either, each row is one line, which the
    terminal breaks."""
    write(tmp_path, ended())
    for table in (my_job_table(list_jobs(tmp_path)), nodes(shot(tmp_path, with_one_recovery()))):
        text = screen.grid(table)
        console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
        console.print(text, crop=False)
        assert isinstance(console.file, io.StringIO)
        lines = console.file.getvalue().splitlines()
        whole = {table.columns.index(name) for name in table.right} | {0, 1}
        for row in table.rows:
            (line,) = (line for line in lines if row.cells[0] in line.split())
            assert all(row.cells[index] in line for index in whole)
        if width >= 120:
            assert max(map(len, lines)) <= width


def test_ranks_and_heartbeats_are_on_both_pages(tmp_path: Path) -> None:
    """For a rank: step, lag, silence and open sections, outermost first; for a node: the age of its heartbeat;
    nothing without a heartbeat."""
    recorder = to_first_cycle()
    sections = {1: (("checkpoint", 11.6), ("fsync", 2.6))}
    beat = recorder.beat("n0", 100, 97, quiet={0: 0.1, 1: 11.6}, sections=sections)
    taken = live_shot(tmp_path, recorder, beat)
    for page in (plain.page(taken), drawn(screen.render(taken), width=200)):
        words = [" ".join(line.split()) for line in page.splitlines()]
        assert any(line.endswith("main-0 0 n0 100 0 500 ms -") for line in words)
        assert any(line.endswith("main-0 1 n0 97 3 12.0 s checkpoint 12.0 s › fsync 3.00 s") for line in words)
        assert any("n0 active main-0 0-1 100" in line and line.endswith("400 ms -") for line in words)
        assert any("n5 standby" in line and line.endswith("- -") for line in words)


def test_the_object_has_ages_and_ranks(tmp_path: Path) -> None:
    """`beat_age_s` is by the store's clock, and null if no heartbeat is known; every rank is listed, in order."""
    recorder = to_first_cycle()
    taken = live_shot(tmp_path, recorder, recorder.beat("n1", 5, 4, quiet={2: 1.0}, teardown="ask"))
    told = msgspec.json.decode(msgspec.json.encode(snapshot.as_status(taken)))
    nodes = {node["name"]: node for node in told["nodes"]}
    assert round(nodes["n1"]["beat_age_s"], 3) == 0.4
    assert nodes["n1"]["teardown"] == "ask"
    assert (nodes["n0"]["beat_age_s"], nodes["n0"]["teardown"]) == (None, None)
    assert [rank["rank"] for rank in told["ranks"]] == list(range(8))
    rank = told["ranks"][3]
    assert (rank["step"], rank["lag"], rank["quiet_s"], rank["sections"]) == (4, 1, None, [])


def test_an_ended_jobs_object_has_every_key(tmp_path: Path) -> None:
    """Values that only a running job's store has are null or empty, and never left out."""
    told = msgspec.json.decode(msgspec.json.encode(snapshot.as_status(shot(tmp_path, ended()))))
    assert {node["beat_age_s"] for node in told["nodes"]} == {None}
    assert (told["ranks"], told["last_stacks"]) == ([], None)


def test_of_many_ranks_the_late_and_the_quiet_come_first(tmp_path: Path) -> None:
    """A screen has room for a few of a thousand ranks: the worst are listed, and one line sums up all others."""
    role = RolePlan(name="main", command=("x",), nodes_per_replica=128, workers_per_node=8)
    recorder = Recorder(Plan(name="big", roles=(role,), workdir="/w", folder="/j", fault_tolerance=plain_bounds()))
    recorder.join()
    recorder.start_workers(took_s=0.0)
    beats = [recorder.beat(node, *[500] * 8, quiet=dict.fromkeys(range(1024), 0.1)) for node in recorder.nodes]
    late, quiet = recorder.beat("n77", *[500] * 7, 460), recorder.beat("n5", *[500] * 8, quiet={42: 90.0})
    taken = live_shot(tmp_path, recorder, *beats, late, quiet)
    for page in (plain.page(taken), drawn(screen.render(taken))):
        rows = [line.split() for line in page.splitlines()]
        shown = [row[row.index("main-0") + 1 :] for row in rows if "main-0" in row and row[-1] == "-"]
        ranks = [row[:4] for row in shown if row[1].startswith("n") and row[2] in ("460", "500")]
        assert ranks[:2] == [["623", "n77", "460", "40"], ["42", "n5", "500", "0"]]
        assert "other ranks: at most 0 steps behind, quiet for 500 ms at most" in page
    assert "and 1016 other ranks" in drawn(screen.render(taken))


def test_a_silent_node_and_a_quarantined_one_say_why(tmp_path: Path) -> None:
    """The note of a lost node has Slurm's state and for how long its ranks still wait; the job's note names the node
    whose death must be proven."""
    recorder = to_first_cycle()
    recorder.lose("n2", safe_after_s=33.0)
    recorder.tell(SlurmNodeState(node="n2", state="DOWN"), after_s=0.0)
    recorder.ready(after_s=0.0)
    page = plain.page(shot(tmp_path, recorder))
    assert "heartbeat timeout; its ranks wait up to 32.0 s for proof of its death; Slurm says DOWN" in page
    assert "main-0 waits for proof of the death of n2" in page
    for time in range(3):
        recorder.lose("n5", at=None)
        recorder.tell(NodeJoined(node="n5", incarnation=f"again-{time}", seq=1, addr="h", port=1))
    row = next(line for line in plain.page(shot(tmp_path, recorder)).splitlines() if line.startswith("n5"))
    assert row.split()[1] == "quarantined"
    assert row.endswith("lost 3 times (limit 3)")


def test_stacks_of_a_hang_are_pointed_at(tmp_path: Path) -> None:
    """The failure has the path of the file with the hung worker's stacks; it can be opened from the current
    folder."""
    recorder = to_first_cycle()
    recorder.hang("n1", 3)
    taken = shot(tmp_path, recorder)
    file = str(taken.folder.path / "stacks/main-0/rank-3.txt")
    assert f"stacks: {file}" in plain.page(taken)
    assert file in drawn(screen.render(taken), width=400)


def _fields(plan: Plan) -> dict[str, object]:
    return {name: getattr(plan, name) for name in plan.__struct_fields__}
