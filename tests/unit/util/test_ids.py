"""Incarnation names, and which of two is older."""

from __future__ import annotations

import pytest

from nvrx_slurm.util.ids import new_incarnation, precedes, succeeding


def test_process_that_joins_again_is_known_as_newer():
    """Each later name follows all earlier ones; the first has no number."""
    first = new_incarnation()
    assert first.isalnum()
    names = [first, *(succeeding(first, number) for number in (1, 2, 10))]
    for at, name in enumerate(names):
        assert [precedes(name, other) for other in names] == [False] * (at + 1) + [True] * (len(names) - at - 1)


@pytest.mark.parametrize(("one", "other"), [("a", "b"), ("a", "b-1"), ("a-1", "b-2"), ("a", "a-x"), ("a", "a")])
def test_other_processes_are_neither_newer_nor_older(one, other):
    """The names of two processes do not show which process is older."""
    assert not precedes(one, other)
