"""Sizes of memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.jobspec.values import parse_size, size_words

WRITTEN = {
    "2GiB": 2 << 30,
    "500MB": 500_000_000,
    "1.5 GiB": 3 << 29,
    "1tib": 1 << 40,
    "64KiB": 65536,
    "7": 7,
    "7B": 7,
}


@pytest.mark.parametrize(("text", "size_bytes"), WRITTEN.items())
def test_a_size_is_read(text: str, size_bytes: int) -> None:
    """A number with a unit of 1024s or of 1000s, or a number of bytes."""
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("value", ["", "GiB", "2 G", "-1GiB", "1e9", "two", "2GiBs", True, None, "\u0662GiB"])
def test_what_is_no_size_is_refused(value: object) -> None:
    """The message shows how to write one."""
    with pytest.raises(ValueError, match="is no size; write it like 2GiB, 500MB"):
        parse_size(value)


@given(st.integers(min_value=0, max_value=1 << 60))
def test_a_size_survives_its_words(size_bytes: int) -> None:
    """`config show` prints a size that is read back as the same size."""
    assert parse_size(size_words(size_bytes)) == size_bytes


def test_words_use_the_largest_unit_that_is_exact() -> None:
    """A size is printed in bytes only if no larger unit is exact."""
    assert [size_words(size) for size in (2 << 30, 1_500_000, 1025, 0)] == ["2GiB", "1500KB", "1025B", "0B"]
