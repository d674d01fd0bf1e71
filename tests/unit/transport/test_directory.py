"""Records of the directory, and the checks of its arguments; `tests/transport/test_directory.py` tests it with a
store."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.errors import UsageError
from nvrx_slurm.transport.directory import (
    LONGEST_RECORD_BYTES,
    Directory,
    Duplicates,
    Published,
    checked_id,
    checked_topic,
    pack,
    unpack,
)
from nvrx_slurm.transport.errors import TransportError
from nvrx_slurm.transport.ref import LONGEST_SCHEMA, PayloadRef

REF = PayloadRef(node="n1", ring="nvrx-ring-7-9-ab", slot=1, generation=5, size=64, ports=("tcp://n1:4000",))
PUBLISHED = Published(ref=REF, replica="rollout-1", node="n1", generation=2, cycle=3, publisher="p", number=4)
AS_BUILTINS = msgspec.msgpack.decode(pack(PUBLISHED))


def packed(**changes: object) -> bytes:
    """The record with other fields, as a writer without these checks would store it."""
    return msgspec.msgpack.encode({**AS_BUILTINS, **changes})


def test_a_record_comes_back_as_it_was_and_with_its_place():
    """The ref and the publisher are the same, and the place is added."""
    assert unpack(pack(PUBLISHED), "17-1") == msgspec.structs.replace(PUBLISHED, id="17-1")


def test_a_place_in_the_record_itself_is_ignored():
    """The place is the one at which the store has the record."""
    assert unpack(packed(id="99-9"), "17-1").id == "17-1"


def test_a_field_of_a_later_release_passes():
    """An unknown field of the record or of its ref is ignored: two versions can meet during an upgrade."""
    newer = packed(colour="red", ref={**AS_BUILTINS["ref"], "rail": 3})
    assert unpack(newer, "").ref == REF


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        packed(version=2),
        packed(ref=None),
        packed(cycle=-1),
        packed(replica="x" * 256),
        packed(ref={**AS_BUILTINS["ref"], "ring": "../../etc/passwd"}),
        packed(ref={**AS_BUILTINS["ref"], "schema": "x" * (LONGEST_SCHEMA + 1)}),
        packed(ref={**AS_BUILTINS["ref"], "ports": ["tcp://n1:1"] * 65}),
        packed(padding=b"x" * LONGEST_RECORD_BYTES),
        b"\x82\xa3ref\xc0\xa1x" + b"\x91" * 100_000,
    ],
)
def test_what_is_no_record_is_refused_with_one_kind_of_error(data):
    """Garbage, another version, invalid names, and a record that is too long are refused."""
    with pytest.raises(TransportError, match=r"record"):
        unpack(data, "1-1")


@given(st.binary(max_size=300))
def test_no_bytes_do_anything_but_to_be_refused(data):
    """Any bytes that the store may have are refused without another effect."""
    with pytest.raises(TransportError):
        unpack(data, "")


@given(st.integers(0, len(pack(PUBLISHED)) - 1), st.integers(0, 255))
def test_a_damaged_record_is_a_record_or_refused(place, byte):
    """With any one byte changed it is read, or refused with the one kind of error."""
    data = bytearray(pack(PUBLISHED))
    data[place] = byte
    with contextlib.suppress(TransportError):
        assert isinstance(unpack(bytes(data), ""), Published)


def test_a_record_that_announces_false_sizes_costs_no_memory():
    """The record announces an array of four thousand million ports."""
    ref = msgspec.msgpack.encode({**AS_BUILTINS["ref"], "ports": []})
    hostile = packed().replace(msgspec.msgpack.encode(AS_BUILTINS["ref"]), ref[:-1] + b"\xdd\xff\xff\xff\xff")
    assert hostile != packed()
    tracemalloc.start()
    try:
        with pytest.raises(TransportError):
            unpack(hostile, "")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_ref_that_no_consumer_could_read_is_not_published():
    """The producer gets the error; otherwise all consumers would ignore the ref silently."""
    with pytest.raises(TransportError, match="schema"):
        pack(msgspec.structs.replace(PUBLISHED, ref=msgspec.structs.replace(REF, schema="x" * (LONGEST_SCHEMA + 1))))


@pytest.mark.parametrize(
    ("generation", "cycle", "replica", "outlived"),
    [(2, 4, "rollout-1", True), (3, 0, "rollout-1", True), (2, 3, "rollout-1", False), (3, 0, "rollout-2", False)],
)
def test_a_record_is_outlived_by_a_later_life_of_its_own_replica(generation, cycle, replica, outlived):
    """Only a later cycle or generation of the same replica outlives it."""
    other = msgspec.structs.replace(PUBLISHED, generation=generation, cycle=cycle, replica=replica)
    assert PUBLISHED.is_outlived_by(other) is outlived


def test_outside_of_a_job_no_publisher_outlives_another():
    """Without an agent there are no replicas, so two publishers are not two lives of one replica."""
    one, other = (msgspec.structs.replace(PUBLISHED, replica="", cycle=cycle) for cycle in (0, 1))
    assert not one.is_outlived_by(other)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=60))
def test_each_record_is_taken_once_however_often_it_is_stored(steps):
    """Each publisher stores its records in order, and may store any earlier one again."""
    duplicates, next_number, had = Duplicates(), dict.fromkeys(range(4), 0), []
    for publisher, back in steps:
        number = max(next_number[publisher] - back, 0)
        next_number[publisher] = max(next_number[publisher], number + 1)
        record = msgspec.structs.replace(PUBLISHED, publisher=str(publisher), number=number)
        if not duplicates.has_had(record):
            had.append((publisher, number))
    assert sorted(had) == [(publisher, number) for publisher in range(4) for number in range(next_number[publisher])]


def test_memory_of_publishers_is_bounded_and_the_silent_go_first():
    """A job may replace its workers for weeks: the publisher without a record for the longest time is forgotten
    first."""
    duplicates = Duplicates(most=2)
    records = {name: msgspec.structs.replace(PUBLISHED, publisher=name) for name in "abc"}
    assert [duplicates.has_had(records[name]) for name in "abacabc"] == [
        False,
        False,
        True,
        False,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("topic", ["payloads", "a", "0", "rollouts.v2_x-1", "x" * 64])
def test_a_topic_is_a_word(topic):
    """A topic has letters, digits, and three other characters."""
    assert checked_topic(topic) == topic


@pytest.mark.parametrize("topic", ["", "-a", ".", "a b", "a:b", "a}", "é", "a\n", "x" * 65, None, 3])
def test_what_is_no_topic_is_named_with_what_is(topic):
    """The message has the topic and the rule."""
    with pytest.raises(UsageError, match="1 to 64 letters"):
        checked_topic(topic)


@pytest.mark.parametrize("identity", ["", "1", "-", "1-1 ", "a-1", "18446744073709551616-0", None])
def test_what_is_no_place_is_refused_before_the_store_sees_it(identity):
    """Only the form of the id of a `Published` is accepted."""
    with pytest.raises(UsageError, match="`id` of a Published"):
        checked_id(identity)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no worker of an nvrx-slurm job"),
        ({"job": "7"}, "no worker of an nvrx-slurm job"),
        ({"url": "redis://127.0.0.1"}, "needs a job"),
        ({"password_file": "/x"}, "password_file without url"),
        ({"url": "127.0.0.1:6379", "job": "7"}, "must look like redis://"),
        ({"url": "redis://:secret@127.0.0.1", "job": "7"}, "must not hold a password"),
        ({"url": "redis://127.0.0.1/0?password=secret", "job": "7"}, "must not hold a password"),
        (
            {"url": "redis://127.0.0.1", "job": "7", "password_file": "/nowhere/x"},
            "/nowhere/x: password_file: cannot be read",
        ),
    ],
)
def test_bad_arguments_are_reported_at_once(arguments, message, monkeypatch):
    """There is one clear message, which repeats no password."""
    for name in ("NVRX_STORE_FILE", "NVRX_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=message) as told:
        Directory(**arguments)
    assert "secret" not in str(told.value)


def test_a_password_that_others_can_read_is_refused(tmp_path):
    """The file is refused, as in job.yaml, and the error says what to do."""
    password = tmp_path / "password"
    password.write_text("hunter2")
    password.chmod(0o644)
    with pytest.raises(
        UsageError, match=rf"{password}: password_file: can be read by others \(mode 0644\); .*let .* be replaced"
    ):
        Directory("redis://127.0.0.1", job="7", password_file=password)


def test_the_job_of_the_agent_is_the_job(monkeypatch, tmp_path):
    """The error for a store file that cannot be read has its name."""
    monkeypatch.setenv("NVRX_STORE_FILE", str(tmp_path / "store.json"))
    with pytest.raises(UsageError, match=r"store\.json \(NVRX_STORE_FILE\) cannot be read"):
        Directory()


def test_importing_the_module_loads_no_store_client():
    """Importing the module loads no client of a store."""
    names = "{'redis', 'numpy', 'torch', 'click'}"
    code = f"import sys, nvrx_slurm.transport.directory; print({names} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
