"""Records that other processes and other versions read."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.errors import ConfigError, MalformedRecord
from nvrx_slurm.journal import records
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import (
    AnyRecord,
    Entry,
    NodeJoined,
    WorkersStarted,
    entry_from_json,
    entry_to_json,
)

JOINED = {"event": "node_joined", "node": "n1", "incarnation": "a", "seq": 1, "addr": "h", "port": 5}


def test_record_of_the_previous_minor_version_is_still_read():
    """A field that an older sender does not know has its default."""
    assert records.unpack_record(msgspec.msgpack.encode(JOINED)) == NodeJoined(
        node="n1", incarnation="a", seq=1, addr="h", port=5
    )


def test_record_of_the_next_minor_version_is_read_without_what_it_adds():
    """An unknown field is ignored."""
    newer = {**JOINED, "colour": "blue"}
    assert records.unpack_record(msgspec.msgpack.encode(newer)) == records.unpack_record(
        msgspec.msgpack.encode(JOINED)
    )


def test_unknown_event_is_an_error_not_a_guess():
    """An event that no version knows is refused."""
    with pytest.raises(MalformedRecord):
        records.unpack_record(msgspec.msgpack.encode({"event": "nonsense"}))


def test_records_are_frozen():
    """A record cannot be changed after it was made."""
    with pytest.raises(AttributeError):
        records.unpack_record(msgspec.msgpack.encode(JOINED)).port = 6


@given(st.integers(1, 10**9), st.floats(0, 4e9), st.dictionaries(st.integers(0, 9999), st.integers(1, 4194304)))
def test_journal_line_and_wire_form_give_the_record_back(n, t, pids):
    """Decoding the JSON line or the msgpack form gives the record again, including numeric keys."""
    record = WorkersStarted(node="n", incarnation="i", seq=3, replica="main-0", cycle=1, pids=pids)
    entry = Entry(n=n, t=round(t, 6), record=record)
    assert entry_from_json(entry_to_json(entry)) == entry
    assert records.unpack_entry(records.pack(entry)) == entry


def test_events_of_journals_up_to_0_1_are_read_under_their_names_of_today():
    """Old names are read in JSON and in msgpack; a field's value that equals an old name stays as it is."""
    entry = Entry(n=1, t=0.5, record=records.RendezvousOpened(replica="round_closed", cycle=3))
    name, old = "rendezvous_opened", "round_opened"
    line = entry_to_json(entry)
    assert entry_from_json(line.replace(f'"event":"{name}"'.encode(), f'"event":"{old}"'.encode())) == entry
    packed = records.pack(entry)
    packed_name, packed_old = msgspec.msgpack.encode(name), msgspec.msgpack.encode(old)
    assert packed_name in packed
    assert records.unpack_entry(packed.replace(packed_name, packed_old)) == entry


def test_every_record_has_a_docstring():
    """The journal's reference is generated from the docstrings."""
    for kind in AnyRecord.__args__:
        assert kind.__doc__, kind


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("rendezvous_opened", {"replica": "../../../../x", "cycle": 0}),
        ("rendezvous_opened", {"replica": "..", "cycle": 0}),
        ("rendezvous_opened", {"replica": "", "cycle": 0}),
        ("rendezvous_opened", {"replica": "main-0\n", "cycle": 0}),
        ("rendezvous_opened", {"replica": "a\x1b[2J", "cycle": 0}),
        ("rendezvous_opened", {"replica": "x" * 256, "cycle": 0}),
        ("rendezvous_opened", {"replica": "main-0", "cycle": -1}),
        ("rendezvous_opened", {"replica": "main-0", "cycle": 1 << 31}),
        ("rendezvous_opened", {"replica": "main-0", "cycle": 0, "generation": 1 << 62}),
        ("fence", {"node": "/etc/passwd", "incarnation": "a"}),
        ("node_left", {"node": "a/b", "incarnation": "a", "seq": 1, "reason": "r"}),
        ("stacks_dumped", {"node": "n1", "incarnation": "a", "seq": 1, "why": "w", "files": {0: "../secret"}}),
        ("stacks_dumped", {"node": "n1", "incarnation": "a", "seq": 1, "why": "w", "files": {0: "/etc/passwd"}}),
        ("stacks_dumped", {"node": "n1", "incarnation": "a", "seq": 1, "why": "w", "files": {0: "logs/../../x"}}),
    ],
)
def test_name_that_would_leave_its_folder_or_number_out_of_bounds_is_refused(kind: str, fields: dict[str, object]):
    """Readers build paths from names and pack numbers again, so both the store's and the journal's codec check
    them."""
    record = {"event": kind, **fields}
    with pytest.raises(MalformedRecord):
        records.unpack_record(msgspec.msgpack.encode(record))
    with pytest.raises(MalformedRecord):
        entry_from_json(msgspec.json.encode({"n": 1, "t": 0.0, **record}))


@pytest.mark.parametrize("step", [-1, 1 << 63, (1 << 64) - 1])
def test_step_out_of_bounds_is_refused(step: int):
    """It must fit into 64 bits with a sign, as the page that it comes from."""
    beat = {"node": "n1", "incarnation": "a", "steps": {0: step}}
    with pytest.raises(MalformedRecord):
        records.unpack_heartbeat(msgspec.msgpack.encode(beat))


@pytest.mark.parametrize("name", ["n1", "gpu-a_07.site", "policy-0", "...x", "nœud", "a b"])
def test_names_that_are_in_use_pass(name: str):
    """Any single component of a path is a valid name."""
    opened = records.RendezvousOpened(replica=name, cycle=0)
    assert records.unpack_record(records.pack(opened)) == opened


@pytest.mark.parametrize("garbled", [b"", b"{", b"\xff\xfe", b'{"job_id":7}', b"[" * 100_000, b'{"name":"\xff"}'])
@pytest.mark.parametrize("name", ["job.json", "store.json", "result.json"])
def test_garbled_file_of_a_job_is_one_clear_error(tmp_path: Path, name: str, garbled: bytes):
    """The error names the file and says what to do; its exit code is 2."""
    folder = JobFolder(tmp_path / "j1")
    folder.create()
    (folder.path / name).write_bytes(garbled)
    (folder.path / name).chmod(0o600)
    read = {"job.json": folder.read_info, "store.json": folder.read_store, "result.json": folder.read_result}[name]
    with pytest.raises(ConfigError, match="restore the file, or remove the job's folder") as caught:
        read()
    assert caught.value.file == str(folder.path / name)
    assert caught.value.exit_code == 2
