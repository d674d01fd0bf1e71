"""Dumps that PyTorch 2.13 wrote: four ranks of gloo, of which rank 2 never entered the fourth all_reduce."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.attribution.analyze.collectives import standstill
from nvrx_slurm.attribution.analyze.flight_recorder import Dump, DumpError, read_dump

DUMPS = Path(__file__).with_name("dumps")
FORMS = ["nccl_trace_rank_{}", "trace_{}.json"]


def dumps(form: str, ranks: range = range(4)) -> list[Dump]:
    """What the ranks wrote."""
    return [read_dump((DUMPS / form.format(rank)).read_bytes(), rank) for rank in ranks]


@pytest.mark.parametrize("form", FORMS)
def test_the_rank_that_did_not_come_is_named(form: str) -> None:
    """The missing rank is named, with the collective in which the others wait."""
    still = standstill(dumps(form))
    assert still is not None
    assert (still.kind, still.ranks) == ("missing", (2,))
    assert still.call.words == "all_reduce number 4 of default_pg"


def test_a_rank_that_left_no_dump_is_missing_too() -> None:
    """If the world is known, a rank without a dump is missing too."""
    still = standstill(dumps("trace_{}.json", range(2)), world=range(3))
    assert still is not None
    assert (still.kind, still.ranks) == ("missing", (2,))


def test_the_first_version_of_the_format_is_read() -> None:
    """Version 1.1 of the format, which had only `seq_id` and `pg_id`, is read."""
    entry = {"pg_id": 0, "seq_id": 7, "profiling_name": "nccl:all_gather", "state": "scheduled"}
    dump = read_dump(json.dumps({"version": "1.1", "entries": [entry]}).encode(), 3)
    assert (dump.rank, dump.last, dump.calls[0].words) == (3, {"0": 7}, "all_gather number 7 of group 0")


@pytest.mark.parametrize("data", [b"", b"{", b"[1, 2]", b"hello", b'{"entries": 3}', b"[" * 100_000])
def test_what_is_no_dump_is_an_error(data: bytes) -> None:
    """All such errors are of one kind, with a sentence."""
    with pytest.raises(DumpError, match=r"\w+ \w+"):
        read_dump(data, 0)


def test_hostile_shapes_are_left_out() -> None:
    """Nested lists of exponential size are not followed."""
    deep: list[object] = []
    for _ in range(50):
        deep = [deep, deep]
    entry = {"process_group": ("0", "default_pg"), "collective_seq_id": 1, "input_sizes": [deep, [3, 4]]}
    from nvrx_slurm.attribution.analyze import flight_recorder

    call = flight_recorder._call(entry)
    assert call.shapes[-1] == (3, 4)


def test_a_name_that_is_not_utf_8_is_one_that_records_can_hold() -> None:
    """A name's bytes that are not UTF-8, lone surrogates in the dump, are replaced, so that records can encode it."""
    entry = {"seq_id": 1, "state": "scheduled", "profiling_name": "gloo:tr\udcffin"}
    (call,) = read_dump(json.dumps({"version": "1.1", "entries": [entry]}).encode(), 0).calls
    assert call.operation.encode() == b"gloo:tr?in"


@given(
    st.sampled_from(FORMS), st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=8), st.data()
)
def test_garbled_bytes_are_one_kind_of_error(form: str, changes: list[tuple[int, int]], data: st.DataObject) -> None:
    """Any torn or hostile file gives a dump or a `DumpError`."""
    raw = bytearray((DUMPS / form.format(0)).read_bytes()[: data.draw(st.integers(0, 4096))])
    for at, byte in changes:
        if raw:
            raw[at % len(raw)] = byte
    with contextlib.suppress(DumpError):
        read_dump(bytes(raw), 0)
