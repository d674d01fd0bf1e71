"""Durations, names and records in words."""

from __future__ import annotations

import pytest

from nvrx_slurm.journal import records
from nvrx_slurm.report.sentences import Lines, describe
from nvrx_slurm.report.words import event_name, names, numbers, seconds
from tests.unit.report.recorder import ended


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.0, "0.0 ms"),
        (0.0021, "2.1 ms"),
        (0.0994, "99.4 ms"),
        (0.0999, "100 ms"),
        (0.312, "312 ms"),
        (0.9999, "1.00 s"),
        (4.214, "4.21 s"),
        (42.06, "42.1 s"),
        (59.99, "1m 00s"),
        (250, "4m 10s"),
        (3599.6, "1h 00m"),
        (11_045, "3h 04m"),
        (183_600, "2d 03h"),
    ],
)
def test_durations_have_three_digits_that_matter(duration_s: float, text: str) -> None:
    """A duration is short, and rounding never gives 60 s, 60 minutes or 1000 ms."""
    assert seconds(duration_s) == text


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([], "-"),
        (["n1"], "n1"),
        (["n0", "n1", "n2", "n5"], "n[0-2,5]"),
        (["n0", "n1", "n4", "n3"], "n[0-1,4,3]"),
        (["a08", "a09", "a10", "b1"], "a[08-10],b1"),
        (["n9", "n10"], "n[9-10]"),
        (["login", "login"], "login,login"),
        (["x-1-a", "x-2-a"], "x-1-a,x-2-a"),
    ],
)
def test_node_names_are_folded_in_their_order(nodes: list[str], text: str) -> None:
    """Names are folded as Slurm folds them, and keep their order, which is that of the ranks."""
    assert names(nodes) == text


def test_ranks_are_sorted_and_folded() -> None:
    """Ranks print as ranges."""
    assert numbers([6, 0, 1, 2]) == "0-2,6"
    assert numbers([]) == "-"


def test_a_record_is_described_in_one_line() -> None:
    """So is each record of a whole journal, and some that it lacks."""
    others: list[records.AnyRecord] = [
        records.Tick(),
        records.Signalled(reason="time_limit"),
        records.ControllerStarted(epoch=2, host="h", pid=7),
        records.WorkerFailed(node="n", incarnation="i", seq=1, replica="main-0", cycle=0, rank=1, exit_code=3),
    ]
    for record in [*(entry.record for entry in ended().entries), *others]:
        assert describe(record)
        assert "\n" not in describe(record)
        assert event_name(record)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"exit_code": 3}, "rank 1 on n exited with code 3, main-0 cycle 0"),
        ({"signal": 11, "step": 5}, "rank 1 on n was killed by SIGSEGV, main-0 cycle 0, at step 5"),
        ({"error": "no such file"}, "rank 1 on n could not start: no such file, main-0 cycle 0"),
        ({"exit_code": 1, "error": "KeyError: 3"}, "rank 1 on n failed: KeyError: 3, main-0 cycle 0"),
    ],
)
def test_a_workers_end_is_described_by_its_kind(how: dict[str, object], text: str) -> None:
    """The text has the exit code, the signal by name, or why the worker could not start."""
    fact = records.WorkerFailed(node="n", incarnation="i", seq=1, replica="main-0", cycle=0, rank=1, **how)
    assert describe(fact) == text


AGENT = {"node": "n2", "incarnation": "i", "seq": 1}
WHY = "no step for 612 s (limit 600 s) after step 41"


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (
            records.WorkerHung(**AGENT, replica="main-0", cycle=1, rank=3, why=WHY, where="train.py:41 in step"),
            f"rank 3 on n2 hung: {WHY}, in train.py:41 in step, main-0 cycle 1",
        ),
        (
            records.WorkerHung(**AGENT, replica="main-0", cycle=1, rank=3, why=WHY, stacks="s/rank-3.txt"),
            f"rank 3 on n2 hung: {WHY}, main-0 cycle 1; stacks: s/rank-3.txt",
        ),
        (
            records.NodeIsolated(**AGENT, replica="main-0", cycle=1, for_s=31.2),
            "n2 had lost store and controller for 31.2 s and stopped its workers, main-0 cycle 1",
        ),
        (
            records.Learned(**AGENT, role="main", seen={"step": (50, 1.31), "checkpoint": (3, 32.2)}),
            "n2 learned how long main takes: checkpoint 32.2 s (longest of 3), step 1.31 s (longest of 50)",
        ),
        (
            records.StacksDumped(
                **AGENT,
                why="asked for (ab12)",
                request="ab12",
                files={2: "a", 3: "b", 4: "c"},
                where={2: "t.py:1 in f", 3: "t.py:9 in g", 4: "t.py:1 in f"},
                problems=("disk full",),
            ),
            "n2 wrote the stacks of ranks 2-4: asked for (ab12); "
            "ranks 2,4 are in t.py:1 in f; rank 3 is in t.py:9 in g; disk full",
        ),
        (
            records.StacksDumped(**AGENT, why="teardown", problems=("disk full",)),
            "n2 wrote no stacks: teardown; disk full",
        ),
        (
            records.NodeLost(node="n2", incarnation="i", cause="heartbeat_timeout", safe_after_s=32.0),
            "n2 was lost: heartbeat timeout; its ranks wait up to 32.0 s for proof of its death",
        ),
        (
            records.NodeFenced(node="n3", incarnation="i", proof="its kernel reset the connection"),
            "n3's workers are proven dead: its kernel reset the connection",
        ),
        (
            records.SlurmNodeState(node="n2", state="DOWN+NOT_RESPONDING", reason="Not responding"),
            "Slurm says of n2: DOWN+NOT_RESPONDING (Not responding)",
        ),
        (records.SlurmNodeState(node="n2", state="IDLE"), "Slurm says of n2: IDLE"),
        (
            records.AgentsStarted(nodes=("n1", "n2"), step_ended=True, attempt=2),
            "the agents' srun ended; the batch host starts agents on n[1-2] (attempt 2)",
        ),
        (
            records.DumpAsked(request="ab12", by="ann@login1", ranks=(3, 4), replica="main-0"),
            "ann@login1 asked for the stacks of ranks 3-4 of main-0 (request ab12)",
        ),
        (
            records.RestartDecided(
                replica="main-0",
                cycle=1,
                action="restart_replica",
                cause=f"rank 3 on n2 hung: {WHY}",
                node="n2",
                step=41,
            ),
            f"the controller restarts main-0 after cycle 1: rank 3 on n2 hung: {WHY} (0 restarts left)",
        ),
        (records.DumpOrdered(request="ab12"), "agents write the stacks of all ranks (request ab12)"),
        (
            records.Quarantined(node="n2", deaths=3, reason="lost 3 times (limit 3)"),
            "n2 gets no ranks any more: lost 3 times (limit 3)",
        ),
        (
            records.RendezvousOpened(replica="main-0", cycle=2, dump="rank 3 hung"),
            "the rendezvous of main-0 cycle 2 opened; its nodes write their stacks first: rank 3 hung",
        ),
        (
            records.Shutdown(exit_code=124, reason="out of time", checkpoint=True),
            "the job ends with exit code 124: out of time; workers may save what they can first",
        ),
    ],
)
def test_hangs_silence_and_death_are_one_plain_sentence_each(record: records.AnyRecord, text: str) -> None:
    """`nvrx-slurm events` prints in one line what happened, to which node or rank, and on what evidence."""
    assert describe(record) == text


STARTED = {**AGENT, "replica": "main-0", "cycle": 1, "pids": {0: 7, 1: 8}, "spawn_s": 0.008}
CYCLES = [("main-0", 1), ("main-1", 2), ("rollout-0", 1)]
BY_BASH = "the command is no Python program"


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (records.WorkersStarted(**STARTED), "rank=pid 0=7, 1=8"),
        (records.WorkersStarted(**STARTED, warm=2), "rank=pid 0=7, 1=8; 2 workers warm"),
        (records.WorkersStarted(**STARTED, cold=BY_BASH), f"rank=pid 0=7, 1=8; cold: {BY_BASH}"),
        (
            records.WorkersStarted(**STARTED, warm=1, cold="it died"),
            "rank=pid 0=7, 1=8; 1 worker warm, 1 cold: it died",
        ),
        (
            records.Prewarmed(**AGENT, role="main", modules=812, took_s=2.5, memory_bytes=300 << 20),
            "n2 has a warm process of main after 2.50 s (812 modules, 300 MiB)",
        ),
        (
            records.Prewarmed(**AGENT, role="main", memory_bytes=3 << 30, skipped={"ray": "it starts 3 threads"}),
            "n2 has a warm process of main after 0.0 ms (0 modules, 3.0 GiB); without ray: it starts 3 threads",
        ),
        (
            records.PrewarmFailed(**AGENT, role="main", why="its setup failed: KeyError: 3"),
            "workers of main start cold on n2: its setup failed: KeyError: 3",
        ),
    ],
)
def test_how_workers_start_is_said_with_the_reason(record: records.AnyRecord, text: str) -> None:
    """The text says warm, or cold and why; nothing if the job asks for no warm process."""
    assert describe(record).endswith(text)


def test_why_workers_start_cold_is_said_once_for_each_role_and_reason() -> None:
    """It is not repeated for each node and cycle; `prewarm_failed` may have reported it before."""
    why, lines = "it has died", Lines()
    started = [{**AGENT, "replica": replica, "cycle": cycle, "pids": {0: 7}} for replica, cycle in CYCLES]
    told: list[records.AnyRecord] = [
        *(records.WorkersStarted(**each, cold=BY_BASH) for each in started),
        records.PrewarmFailed(**AGENT, role="main", why=why),
        records.WorkersStarted(**started[0], cold=why),
    ]
    ends = [lines.in_words(records.Entry(n=n, t=n, record=record)) for n, record in enumerate(told, start=1)]
    assert [end.rpartition("; ")[2] for end in ends[:3]] == [f"cold: {BY_BASH}", "cold", f"cold: {BY_BASH}"]
    assert ends[3].endswith(f"start cold on n2: {why}")
    assert ends[4].endswith("; cold")
