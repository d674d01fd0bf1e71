"""Pickles of plain values, and of anything else."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.attribution.analyze.unpickling import NotPlainError, load_plain

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.lists(inner).map(tuple),
    max_leaves=30,
)


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@given(PLAIN, st.integers(min_value=2, max_value=pickle.HIGHEST_PROTOCOL))
def test_plain_values_come_back(value: object, protocol: int) -> None:
    """Plain values can be read, whichever protocol wrote them."""
    assert load_plain(pickle.dumps(value, protocol)) == value


def test_nothing_is_called(tmp_path: Path) -> None:
    """A pickle that calls something is refused before it does, and the opcode is named."""
    data = pickle.dumps({"entries": [Hostile(tmp_path / "made")]}, protocol=2)
    with pytest.raises(NotPlainError, match="GLOBAL: only containers, numbers and texts"):
        load_plain(data)
    assert list(tmp_path.iterdir()) == []


def test_a_huge_memo_index_costs_nothing() -> None:
    """The standard unpickler reserves 32 GiB for these nine bytes."""
    assert load_plain(b"\x80\x02Nr\xff\xff\xff\xff.") is None


def test_a_torn_pickle_is_refused_wherever_it_ends() -> None:
    """A pickle that is torn at any byte is one kind of error."""
    whole = pickle.dumps({"entries": [{"seq": 2**70, "name": "all_reduce", "sizes": [(3, 4)]}]}, protocol=4)
    for length in range(len(whole)):
        with pytest.raises(NotPlainError):
            load_plain(whole[:length])


@given(st.binary(max_size=200))
def test_any_bytes_give_a_value_or_one_kind_of_error(data: bytes) -> None:
    """Any bytes give a value or a `NotPlainError`: a file need not be what its name says."""
    try:
        load_plain(data)
    except NotPlainError as error:
        assert str(error)
