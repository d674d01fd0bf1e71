"""Invalid arguments: each is one UsageError that names the argument, and none has an effect before."""

from __future__ import annotations

import gc
import math
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from nvrx_slurm.errors import UsageError
from nvrx_slurm.transport import (
    AsyncPayloadClient,
    Claim,
    Directory,
    Limits,
    PayloadClient,
    PayloadRef,
    PayloadServer,
    PeerRefused,
    Published,
    RingError,
    ServerLimits,
    SharedRing,
    StaleSlotError,
    TransportError,
    Writing,
    sweep,
)
from tests.transport.harness import read_threads

TOKEN = b"of this test only"


@pytest.fixture
def ring() -> Iterator[SharedRing]:
    with SharedRing.create(slots=2, slot_bytes=4096) as ring:
        yield ring


@pytest.fixture
def server(ring: SharedRing) -> Iterator[PayloadServer]:
    with PayloadServer(ring, host="127.0.0.1", token=TOKEN) as server:
        yield server


@pytest.fixture
def client() -> Iterator[PayloadClient]:
    with PayloadClient(token=TOKEN, transports=("tcp",)) as client:
        yield client


@pytest.mark.parametrize(
    ("named", "wrong"),
    [
        ("transport", 3),
        ("transport", "shm"),
        ("ports", "2"),
        ("ports", 1 << 40),
        ("ports", (70000,)),
        ("ports", (1.5,)),
        ("host", b"n1"),
        ("host", "n" * 300),  # no reader would accept the ref
        ("node", 3),
        ("node", "n" * 300),
        ("most_links", "3"),
        ("most_links", 0),
        ("limits", Limits()),
    ],
)
def test_a_server_names_the_argument_that_cannot_be(ring: SharedRing, named: str, wrong: Any) -> None:
    with pytest.raises(UsageError, match=named):
        PayloadServer(ring, **{named: wrong})


def test_a_server_is_made_of_an_open_ring() -> None:
    with pytest.raises(UsageError, match="ring must be a SharedRing, not str"):
        PayloadServer("nvrx-ring-1-1-0")  # type: ignore[arg-type]
    with SharedRing.create(slots=1, slot_bytes=16) as ring:
        pass
    with pytest.raises(RingError, match="is closed"):
        PayloadServer(ring)


def test_a_server_looks_at_its_ring_without_assertions_too() -> None:
    """The check is no assertion, which `python -O` would remove."""
    code = "from nvrx_slurm.transport import PayloadServer; PayloadServer(None)"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=60)
    assert "UsageError: ring must be a SharedRing" in done.stderr


def test_without_a_token_what_is_on_this_node_can_be_read(ring: SharedRing) -> None:
    """In any order of the transports. With TCP alone, the error asks for the token."""
    with PayloadServer(ring, host="127.0.0.1", token=TOKEN) as server:
        for transports in (("tcp", "shm"), ("shm", "tcp")):
            with PayloadClient(transports=transports) as client:
                assert bytes(client.read(server.write(b"here"), deadline=30.0)) == b"here"
        with (
            PayloadClient(transports=("tcp",)) as client,
            pytest.raises(PeerRefused, match="name the server's token"),
        ):
            client.read(server.write(b"here"))


@pytest.mark.parametrize(
    ("named", "wrong"),
    [
        ("transports", 3),
        ("transports", ([],)),
        ("connections_per_port", "4"),
        ("connections_per_port", math.nan),
        ("keep_s", "x"),
        ("keep_s", math.nan),
        ("most_bytes", None),
        ("most_bytes", math.nan),
        ("concurrency", 1.5),
        ("limits", {}),
        ("limits", ServerLimits()),
    ],
)
def test_a_client_names_the_argument_that_cannot_be(named: str, wrong: Any) -> None:
    with pytest.raises(UsageError, match=named):
        PayloadClient(**{named: wrong})


@pytest.mark.parametrize(
    ("limits", "named", "wrong"),
    [
        (Limits, "answer_s", math.nan),
        (Limits, "answer_s", -1),
        (Limits, "bytes_per_s", 0),
        (Limits, "calls", 0),
        (Limits, "rounds", 0),
        (Limits, "pause_s", "0"),
        (ServerLimits, "hello_s", "5"),
        (ServerLimits, "read_s", -1),
        (ServerLimits, "eviction_s", math.nan),
    ],
)
def test_limits_are_looked_at_when_they_are_made(limits: Callable[..., object], named: str, wrong: Any) -> None:
    with pytest.raises(UsageError, match=named):
        limits(**{named: wrong})


def test_what_is_no_ref_is_refused_with_a_hint(client: PayloadClient, server: PayloadServer) -> None:
    """Every function that takes a ref refuses other objects, and the slot is not changed."""
    ref = server.write(b"hello")
    wrong: Any
    for wrong, hint in (
        (ref.to_json(), "from_json"),
        (ref.to_json().decode(), "from_json"),
        (msgspec.to_builtins(ref), "not dict"),
        (Published(ref=ref), r"give its \.ref"),
        (None, "not NoneType"),
    ):
        for take in (client.read, server.refer, lambda wrong: client.fetch_all([wrong])):
            with pytest.raises(UsageError, match=hint):
                take(wrong)
    for wrong, hint in ((ref, "iterable of PayloadRef"), ("abc", "iterable"), (None, "iterable")):
        with pytest.raises(UsageError, match=hint):
            client.fetch_all(wrong)
    assert bytes(client.read(ref)) == b"hello"  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("node", None),
        ("ring", "../x"),
        ("ring", None),
        ("slot", -1),
        ("slot", 1 << 32),
        ("slot", "0"),
        ("generation", -1),
        ("generation", 1 << 70),
        ("size", -1),
        ("size", "5"),
        ("checksum", "zz"),
        ("schema", None),
        ("ports", "tcp://x:1"),
        ("ports", (3,)),
    ],
)
def test_a_ref_that_is_made_by_hand_is_looked_at(server: PayloadServer, field: str, wrong: Any) -> None:
    """An invalid ref cannot be created, so that no read has to check it."""
    ref = server.write(b"hello")
    with pytest.raises(UsageError, match=f"its {field} is"):
        msgspec.structs.replace(ref, **{field: wrong})


def test_a_ring_is_not_pickled_and_says_what_is(ring: SharedRing) -> None:
    with pytest.raises(UsageError, match="send its handle"):
        pickle.dumps(ring)


def test_a_server_that_is_closed_gives_no_refs(ring: SharedRing) -> None:
    """No reader could use them, so nothing is written either."""
    server = PayloadServer(ring, host="127.0.0.1")
    server.close()
    with pytest.raises(RingError, match="is closed"):
        server.write(b"x")
    with pytest.raises(RingError, match="is closed"):
        server.refer(ring.write(b"x"))
    assert ring.metrics().published == 1


def test_a_client_that_is_forgotten_leaves_no_threads(ring: SharedRing) -> None:
    """The client is garbage collected although it was not closed, and its threads end then."""
    before, client = set(threading.enumerate()), PayloadClient()
    assert client.fetch_all([ring.write(b"x")])
    threads = read_threads() - before
    assert threads
    forgotten = weakref.ref(client)
    del client
    gc.collect()
    assert forgotten() is None
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()


def test_a_server_refers_to_its_own_ring_only(server: PayloadServer) -> None:
    with (
        SharedRing.create(slots=1, slot_bytes=16) as other,
        pytest.raises(UsageError, match="which this server serves"),
    ):
        server.refer(other.write(b"x"))


@pytest.mark.parametrize("wrong", ["1", None, math.nan, math.inf, -1, timedelta(seconds=-1)])
def test_a_deadline_is_seconds_from_now(client: PayloadClient, server: PayloadServer, wrong: Any) -> None:
    with pytest.raises(UsageError, match="deadline"):
        client.read(server.write(b"x"), deadline=wrong)


def test_a_deadline_may_be_a_number_of_numpy(client: PayloadClient, server: PayloadServer) -> None:
    assert bytes(client.read(server.write(b"x"), deadline=np.float32(5))) == b"x"  # type: ignore[arg-type,call-overload]


@pytest.mark.parametrize("transports", [("shm",), ("tcp",)])
@pytest.mark.parametrize("wrong", ["x", 3, np.zeros(5, object), np.zeros(5, [("a", object)])])
def test_into_is_memory_of_plain_bytes(server: PayloadServer, transports: tuple[str, ...], wrong: Any) -> None:
    """Overwriting an array's object pointers with bytes would crash when the array is freed."""
    with PayloadClient(token=TOKEN, transports=transports) as client, pytest.raises(UsageError, match="into"):
        client.read(server.write(b"hello"), into=wrong)


@pytest.mark.parametrize("wrong", ["text", 3, None, [b"a", "b"], np.array([object()]), np.zeros((4, 4))[:, ::2]])
def test_raw_is_buffers_of_plain_bytes(ring: SharedRing, wrong: Any) -> None:
    with pytest.raises(UsageError, match="a payload's buffer"):
        ring.write_raw(wrong)
    assert ring.get_ready_count() == 0


@pytest.mark.parametrize("end", [Writing.publish, Writing.abandon, Writing.drop])
def test_nothing_is_written_after_the_end_of_a_write(ring: SharedRing, end: Callable[[Writing], object]) -> None:
    """By then the slot belongs to a reader or to another writer."""
    writing = ring.begin(5)
    writing.copy_in(0, b"first")
    end(writing)
    with pytest.raises(StaleSlotError, match="this write has ended"):
        writing.copy_in(0, b"later")
    if end is Writing.publish:
        with ring.view() as payload:
            assert bytes(payload) == b"first"  # type: ignore[call-overload]


@pytest.mark.parametrize("wrong", ["0", None, 1.5])
def test_an_offset_is_a_whole_number(ring: SharedRing, wrong: Any) -> None:
    with pytest.raises(UsageError, match="offset"):
        ring.begin(5).copy_in(wrong, b"x")


def test_an_async_client_is_made_of_a_client(client: PayloadClient) -> None:
    with pytest.raises(UsageError, match="client must be a PayloadClient"):
        AsyncPayloadClient(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="most_reads"):
        AsyncPayloadClient(client, most_reads=0)  # it would wait forever


@pytest.mark.parametrize(
    ("named", "wrong"),
    [("url", 3), ("job", 3), ("patience_s", math.nan), ("patience_s", "x"), ("password_file", 3)],
)
def test_a_directory_names_the_argument_that_cannot_be(named: str, wrong: Any) -> None:
    with pytest.raises(UsageError, match=named):
        Directory(**{"url": "redis://127.0.0.1:1", "job": "j", named: wrong})


def test_a_folder_is_a_path_and_is_said_to_be_missing() -> None:
    with pytest.raises(UsageError, match="folder must be a path, not int"):
        sweep(3)  # type: ignore[arg-type]
    assert sweep("/no/such/folder") == []
    with pytest.raises(RingError, match=r"there is no /no/such/folder$"):
        SharedRing.create(slots=1, slot_bytes=16, folder="/no/such/folder")


def test_two_objects_of_one_ring_may_both_remove_it() -> None:
    """Even in the process that has created it: the resource tracker prints no traceback for the second removal."""
    code = (
        "from nvrx_slurm.transport import SharedRing\n"
        "with SharedRing.create(slots=1, slot_bytes=16) as ring, SharedRing.attach(ring.handle) as other:\n"
        "    other.unlink()\n"
    )
    ended = subprocess.run([sys.executable, "-X", "dev", "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


LARGE = [pytest.param(10**400, id="large"), pytest.param(10**5000, id="larger")]
DEEP = '{"ring": "nvrx-ring-0", "unknown": ' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize("wrong", [None, 3, {"ring": "x"}, b"\xff", "\ud800", pytest.param(DEEP, id="deep")])
def test_a_ref_is_made_of_json_only(wrong: Any) -> None:
    with pytest.raises(TransportError, match="no payload reference"):
        PayloadRef.from_json(wrong)


@pytest.mark.parametrize(
    ("named", "wrong"),
    [
        ("slots", "8"),
        ("slots", 1.5),
        ("slot_bytes", None),
        ("lease_s", math.inf),
        ("lease_s", "3"),
        pytest.param("lease_s", 10**400, id="large"),
        ("folder", None),
        ("overwrite", "no"),
        ("checksum", None),
    ],
)
def test_a_ring_names_the_argument_that_cannot_be(named: str, wrong: Any) -> None:
    with pytest.raises(UsageError, match=named):
        SharedRing.create(**{"slots": 1, "slot_bytes": 16, named: wrong})


@pytest.mark.parametrize("wrong", ["1", math.nan, *LARGE])
def test_a_ring_waits_for_seconds(ring: SharedRing, wrong: Any) -> None:
    for use in (ring.read, ring.drain, lambda timeout_s: ring.write(b"", timeout_s=timeout_s)):
        with pytest.raises(UsageError, match="timeout_s"):
            use(timeout_s=wrong)


@pytest.mark.parametrize("wrong", ["a", None, math.nan, math.inf, 1e11, *LARGE])
def test_a_lease_is_a_number_of_seconds(ring: SharedRing, wrong: Any) -> None:
    ring.write(b"x")
    claim = ring.claim(0)
    assert isinstance(claim, Claim)
    with pytest.raises(UsageError, match="lease_s"):
        claim.renew(wrong)
    assert claim.finish(consumed=False)


def test_a_ring_says_what_is_no_ref_and_no_name(ring: SharedRing) -> None:
    wrong: Any = ring.write(b"x").to_json()
    for use in (ring.read, ring.try_read, ring.claim_ref):
        with pytest.raises(UsageError, match="from_json"):
            use(wrong)
    with pytest.raises(UsageError, match="handle or its name"):
        SharedRing.attach(ring)  # type: ignore[arg-type]


def test_only_the_creator_of_a_ring_removes_it() -> None:
    """A ring that was attached is closed, with or without a `with` block, and its file stays until its creator
    ends."""
    with SharedRing.create(slots=1, slot_bytes=16) as ring:
        file = Path("/dev/shm", ring.name)
        with SharedRing.attach(ring.handle):
            pass
        assert file.exists()
        SharedRing.attach(ring.handle).close()
        assert file.exists()
    assert not file.exists()
