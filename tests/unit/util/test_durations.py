"""Durations and Slurm's time limits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.util.durations import parse_duration, parse_time_limit, slurm_time, words

WHOLE_S = st.integers(min_value=0, max_value=10 * 365 * 86400)
MILLIS = st.integers(min_value=0, max_value=999)
UNITS = st.lists(st.tuples(st.integers(0, 500), st.sampled_from(["ms", "s", "m", "h", "d"])), min_size=1, max_size=5)
WORTH_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}


@given(st.floats(min_value=0, max_value=1e9, allow_nan=False))
def test_words_and_parsing_are_inverse(seconds: float) -> None:
    """For any duration, parsing its text gives the same number of seconds."""
    assert parse_duration(words(seconds)) == seconds


@given(UNITS)
def test_parts_add_up(parts: list[tuple[int, str]]) -> None:
    """A duration of several parts is their sum."""
    text = "".join(f"{count}{unit}" for count, unit in parts)
    assert parse_duration(text) == pytest.approx(sum(count * WORTH_S[unit] for count, unit in parts))


@given(WHOLE_S)
def test_a_time_limit_survives_slurms_format(seconds: int) -> None:
    """A time limit in Slurm's format or in this tool's is parsed to the same number of seconds."""
    assert parse_time_limit(slurm_time(seconds)) == seconds
    assert parse_time_limit(words(seconds)) == seconds


@given(st.text(max_size=12))
def test_any_text_is_a_duration_or_a_value_error(text: str) -> None:
    """Any text gives a duration that is not negative, or a ValueError that shows how to write one."""
    for parse in (parse_duration, parse_time_limit):
        try:
            assert parse(text) >= 0
        except ValueError as error:
            assert "is no duration; write it like" in str(error)


@pytest.mark.parametrize(
    ("text", "seconds"),
    {
        "90": 5400,
        "1:30": 90,
        "1:30:00": 5400,
        "2-00": 172800,
        "1-12:30": 131400,
        "2-00:00:01": 172801,
        "12h": 43200,
        "90s": 90,
        "UNLIMITED": math.inf,
        "infinite": math.inf,
    }.items(),
)
def test_time_limits_as_sbatch_reads_them(text: str, seconds: float) -> None:
    """A plain number is minutes, then M:S, H:M:S, D-H, D-H:M, D-H:M:S (sbatch(1), --time)."""
    assert parse_time_limit(text) == seconds


@pytest.mark.parametrize(("seconds", "text"), {0: "0s", 90: "1m30s", 0.25: "250ms", 1.5: "1.5s", 86400: "1d"}.items())
def test_words_are_how_people_write(seconds: float, text: str) -> None:
    """The largest units come first, and units with a zero are left out."""
    assert words(seconds) == text


@pytest.mark.parametrize("text", ["", "s", "5x", "5 s", "-1s", "1s2", "1e3", "٣s", "inf", "nan"])
def test_what_is_no_duration(text: str) -> None:
    """Signs, exponents, blanks inside, and digits of other scripts are refused, not guessed."""
    with pytest.raises(ValueError, match="is no duration"):
        parse_duration(text)
