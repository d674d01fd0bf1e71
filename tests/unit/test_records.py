"""Records cross processes and versions."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm import records
from nvrx_slurm.records import AnyRecord, Entry, NodeJoined, WorkersStarted, entry_from_json, entry_to_json

JOINED = {"event": "node_joined", "node": "n1", "incarnation": "a", "seq": 1, "addr": "h", "port": 5}


def test_record_of_the_previous_minor_version_is_still_read():
    """A field that an older sender does not know has its default."""
    assert records.unpack_record(msgspec.msgpack.encode(JOINED)) == NodeJoined(
        node="n1", incarnation="a", seq=1, addr="h", port=5
    )


def test_record_of_the_next_minor_version_is_read_without_what_it_adds():
    """An unknown field passes."""
    newer = {**JOINED, "colour": "blue"}
    assert records.unpack_record(msgspec.msgpack.encode(newer)) == records.unpack_record(
        msgspec.msgpack.encode(JOINED)
    )


def test_unknown_event_is_an_error_not_a_guess():
    """What no version of ours says is refused."""
    with pytest.raises(msgspec.ValidationError):
        records.unpack_record(msgspec.msgpack.encode({"event": "nonsense"}))


def test_records_are_frozen():
    """Nobody changes what was said."""
    with pytest.raises(AttributeError):
        records.unpack_record(msgspec.msgpack.encode(JOINED)).port = 6


@given(st.integers(1, 10**9), st.floats(0, 4e9), st.dictionaries(st.integers(0, 9999), st.integers(1, 4194304)))
def test_journal_line_and_wire_form_give_the_record_back(n, t, pids):
    """Both codecs are each other's inverse, keys that are numbers included."""
    record = WorkersStarted(node="n", incarnation="i", seq=3, replica="main-0", cycle=1, pids=pids)
    entry = Entry(n=n, t=round(t, 6), record=record)
    assert entry_from_json(entry_to_json(entry)) == entry
    assert records.unpack_entry(records.pack(entry)) == entry


def test_every_record_has_a_docstring():
    """The journal's reference is generated from them."""
    for kind in AnyRecord.__args__:
        assert kind.__doc__, kind
