"""Failures of earlier cycles that count as repeats."""

from __future__ import annotations

import pytest

from nvrx_slurm.attribution.analyze.spread import fingerprint
from nvrx_slurm.attribution.analyze.verdict import CycleEnding, Repeat, repeat
from nvrx_slurm.journal.verdicts import Evidence

SEGFAULT = "segfault|Segmentation fault at #|"


def test_numbers_and_folders_do_not_distinguish_two_failures() -> None:
    """A failure is identified by its class, words and frame."""
    one = Evidence(file="/a", line=3, text="Segmentation fault at 0x7f3a, see /home/me/core.11")
    two = Evidence(file="/b", line=9, text="Segmentation fault at 0x55, see /scratch/core.4711")
    assert fingerprint("segfault", one) == fingerprint("segfault", two)
    of_f, of_g = (f"train.py:9 in <module>|{frame}" for frame in ("a.py:3 in f", "b.py:3 in g"))
    assert fingerprint("segfault", one, of_f) != fingerprint("segfault", two, of_g)
    assert fingerprint("segfault", one, of_f) == fingerprint("segfault", two, "main.py:1 in <module>|a.py:3 in f")


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ((), Repeat(0)),
        ((("n1",),), Repeat(1, same_node=True)),
        ((("n2",),), Repeat(1, other_nodes=True)),
        ((("n1",), ("n1",)), Repeat(2, same_node=True)),
        ((("n1",), ("n2",)), Repeat(2, other_nodes=True)),
        (((),), Repeat(1)),
    ],
)
def test_repeat(nodes: tuple[tuple[str, ...], ...], expected: Repeat) -> None:
    """A repeat is on the same node each time, or on others; where the node is not known, it is neither."""
    before = [CycleEnding("segfault", SEGFAULT, each) for each in nodes]
    assert repeat(CycleEnding("segfault", SEGFAULT, ("n1",)), before) == expected


def test_another_failure_in_between_breaks_the_row() -> None:
    """Only repeats directly before the present failure count."""
    other = CycleEnding("gpu_lost", "gpu_lost|Xid #|", ("n1",))
    same = CycleEnding("segfault", SEGFAULT)
    assert repeat(same, [same, other, same]).times == 1
    assert repeat(same, [other, same]).times == 0


def test_a_hang_is_no_repeat() -> None:
    """A hang's line does not say where the rank hung, so two hangs may have different causes."""
    assert repeat(CycleEnding("hang", "hang", ("n1",)), [CycleEnding("hang", "hang", ("n2",))]) == Repeat()
