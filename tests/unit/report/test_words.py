"""Durations, names and records in words."""

from __future__ import annotations

import pytest

from nvrx_slurm import records
from nvrx_slurm.report.words import describe, event_name, names, numbers, seconds, signal_name
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
    """A duration is short, and rounding never shows 60 s, 60 minutes or 1000 ms."""
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
    """Names fold as Slurm's do, and keep their order, which is that of the ranks."""
    assert names(nodes) == text


def test_ranks_are_sorted_and_folded() -> None:
    """Ranks print as ranges."""
    assert numbers([6, 0, 1, 2]) == "0-2,6"
    assert numbers([]) == "-"


def test_every_kind_of_record_has_words() -> None:
    """Each record of a whole journal, and the kinds that it lacks, print as one line without a newline."""
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
    ],
)
def test_a_workers_end_is_told_by_its_kind(how: dict[str, object], text: str) -> None:
    """Exit code, signal by name, or why it could not start."""
    fact = records.WorkerFailed(node="n", incarnation="i", seq=1, replica="main-0", cycle=0, rank=1, **how)
    assert describe(fact) == text


def test_a_signal_without_a_name_keeps_its_number() -> None:
    """An unknown signal is no error."""
    assert signal_name(99) == "signal 99"
