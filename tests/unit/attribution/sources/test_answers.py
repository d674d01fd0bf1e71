"""Which replies of a service count as an answer."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.attribution.sources.base import read_answer, trimmed, verdict_of
from nvrx_slurm.errors import SourceError
from nvrx_slurm.journal.verdicts import Verdict
from tests.unit.attribution.sources.scripted import key_of, said

KEY = key_of()
GOOD = {"key": str(KEY), "state": "done", "attribution": msgspec.to_builtins(said())}


def encoded(**changed: object) -> bytes:
    return msgspec.json.encode({**GOOD, **changed})


def test_a_good_answer_is_read() -> None:
    """The attribution is decoded as it was encoded, and a field of a later version is accepted."""
    answer = read_answer(encoded(written_by="a later version"), KEY)
    assert answer.is_final
    assert verdict_of(answer) == said()


BAD = {
    "no JSON": (b"<html>", "malformed"),
    "nothing": (b"", "truncated"),
    "half of it": (encoded()[:-9], "truncated"),
    "not UTF-8": (b'{"key": "\xff"}', "(?i)utf-8"),
    "a list": (b"[]", "Expected `object`"),
    "another failure": (encoded(key="/jobs/8:0:main-0:0:rank-3"), "another failure"),
    "a state that is none": (encoded(state="finished"), "Invalid enum value 'finished'"),
    "done with nothing": (encoded(attribution=None), "has no attribution"),
    "a verdict that is none": (encoded(attribution={"source": "x", "verdict": "MAYBE"}), "'MAYBE'"),
    "too sure": (encoded(attribution={"source": "x", "verdict": "STOP", "confidence": 1.5}), "0 … 1"),
    "a string for a number": (
        encoded(attribution={"source": "x", "verdict": "STOP", "confidence": "1"}),
        "got `str`",
    ),
    "a rank that is none": (encoded(attribution={"source": "x", "verdict": "STOP", "ranks": ["n1"]}), "ranks"),
}


@pytest.mark.parametrize(("data", "problem"), BAD.values(), ids=BAD)
def test_a_bad_answer_is_refused_with_the_reason(data: bytes, problem: str) -> None:
    """One sentence says what is wrong with it."""
    with pytest.raises(SourceError, match=problem):
        read_answer(data, KEY)


def test_each_part_of_an_answer_has_a_length_that_the_journal_can_hold() -> None:
    """That includes what a later look at the logs adds; numbers that MessagePack cannot encode are left out."""
    long, large = "x" * 100_000, 1 << 70
    line = {"file": long, "line": large, "text": long, "rule": long, "rank": large, "node": long}
    read = {"files": large, "size_bytes": large, "ranks": -large, "agents": large, "silent": [large, 3]}
    texts = ("fault", "explanation", "hint", "reference", "problem", "settle", "meaning")
    attribution = {"source": "x", "verdict": "STOP", **dict.fromkeys(texts, long)}
    attribution |= {"ranks": [large, 3], "missing": [large], "nodes": [long], "primary": line, "runner_up": line}
    attribution |= {"secondary": [line], "read": read | {"problems": [long] * 1000}}
    # As text: the encoder for JSON does not write such numbers.
    data = json.dumps(GOOD | {"attribution": attribution})
    held = trimmed(verdict_of(read_answer(data, KEY)))
    assert len(msgspec.msgpack.encode(held)) < 64 << 10
    assert held.read is not None and (held.read.silent, held.read.ranks) == ((3,), 0)


def test_a_failure_of_the_service_has_its_problem() -> None:
    """`failed` is no verdict: the service's own problem is the reason."""
    with pytest.raises(SourceError, match="no logs there"):
        verdict_of(read_answer(encoded(state="failed", attribution=None, problem="no logs there"), KEY))


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_any_bytes_are_an_answer_or_a_source_error(data: bytes | str) -> None:
    """Reading what a service sends raises no other error."""
    with pytest.raises(SourceError):
        read_answer(data, KEY)


@given(st.data())
def test_a_torn_answer_is_never_taken_for_a_whole_one(data: st.DataObject) -> None:
    """An answer that is cut anywhere is an error."""
    whole = encoded()
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(SourceError):
        read_answer(whole[:cut], KEY)


def test_an_unfinished_answer_is_not_final() -> None:
    """An answer in the state `running` is not final, even if it has a verdict."""
    answer = read_answer(encoded(state="running", revision=2), KEY)
    assert not answer.is_final and answer.attribution is not None
    assert answer.attribution.verdict is Verdict.STOP
