"""Bob's files in /dev/shm, under the names of alice's rings: alice's readers read none of them."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from nvrx_slurm.transport import PayloadClient, PayloadServer, SharedRing
from nvrx_slurm.transport.errors import ForeignRing, RingError, TransportError
from nvrx_slurm.transport.ring import sweep
from nvrx_slurm.transport.ring_file import Layout

SHM = Path("/dev/shm")
SLOTS, SLOT_BYTES = 2, 8192
DEADLINE_S = 30.0
FUTEX_OWNER_DIED, PTHREAD_PRIO_INHERIT = 1 << 30, 32
READ = """
import sys
from nvrx_slurm.transport import PayloadClient, PayloadRef
client = PayloadClient(token=bytes.fromhex(sys.argv[1]), allow_pickle=sys.argv[2] == "claims")
for line in sys.stdin:
    print(bytes(client.read(PayloadRef.from_json(line), deadline=30.0, keep=True)).hex(), flush=True)
"""


# ---- what bob does


def plant(name: str, payload: str) -> None:
    """A complete ring that every user can read and write, with that payload in its first slot, generation 1."""
    with tempfile.TemporaryDirectory() as folder, SharedRing.create(SLOTS, SLOT_BYTES, folder=folder) as ring:
        ring.write_raw(bytes.fromhex(payload))
        (SHM / name).write_bytes(ring.memory)
    (SHM / name).chmod(0o666)


def plant_a_broken_mutex(name: str, payload: str) -> None:
    """The same ring, but the first slot's mutex has priority inheritance, is not robust, and has a dead owner."""
    plant(name, payload)
    with (SHM / name).open("r+b") as file:
        file.seek(Layout(SLOTS, SLOT_BYTES).mutex_at(0))
        file.write(struct.pack("<4Ii", FUTEX_OWNER_DIED | 1, 0, 0, 0, PTHREAD_PRIO_INHERIT))


def truncate(name: str) -> None:
    os.truncate(SHM / name, 0)


def plant_another(name: str, kind: str, target: str) -> None:
    """A file that is not a regular one."""
    path = SHM / name
    if kind == "fifo":
        os.mkfifo(path, 0o666)
        path.chmod(0o666)
    elif kind == "folder":
        path.mkdir(0o777)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    else:
        path.symlink_to(target)


def remove(name: str) -> None:
    path = SHM / name
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


# ---- alice


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[SharedRing]:
    """A ring of alice's on "another node": in a folder where readers do not look."""
    with SharedRing.create(SLOTS, SLOT_BYTES, allow_pickle=True, folder=tmp_path) as ring:
        yield ring


@pytest.fixture
def server(ring: SharedRing) -> Iterator[PayloadServer]:
    with PayloadServer(ring, host="127.0.0.1", ports=1) as server:
        yield server


@pytest.fixture
def planted(bob: Any, ring: SharedRing) -> Iterator[str]:
    """The name of alice's ring. Bob removes what he puts there, since alice may not."""
    yield ring.name
    bob.run(remove, ring.name)


@contextlib.contextmanager
def reader(server: PayloadServer, how: str) -> Iterator[subprocess.Popen[str]]:
    """A process that reads each ref and prints the payload, since a signal may end it."""
    process = subprocess.Popen(
        [sys.executable, "-c", READ, server.token.hex(), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process


def read_by(process: subprocess.Popen[str], ref: Any) -> bytes:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(ref.to_json().decode() + "\n")
    process.stdin.flush()
    return bytes.fromhex(process.stdout.readline())


def test_poisoned_bytes_are_not_read(bob, server, planted, caplog):
    """The segment with the announced name is bob's: the reader gets the payload over the network, and logs one line
    that names the file's owner."""
    refs = [server.write(b"weights" * 100), server.write(b"weights" * 101)]
    bob.run(plant, planted, (b"poison!" * 100).hex())
    with PayloadClient(token=server.token) as client:
        assert [bytes(client.read(ref, deadline=DEADLINE_S)) for ref in refs] == [b"weights" * 100, b"weights" * 101]
    assert [record.levelname for record in caplog.records if f"belongs to user {bob.uid}" in record.message] == [
        "WARNING"
    ]


def test_no_code_of_his_runs(bob, server, planted, tmp_path):
    """Alice's reader accepts pickles, but only from her own rings."""
    sent, mark = PurePosixPath("a" * 500), tmp_path / "code of bob ran"
    ref = server.write(sent)
    attack = b"cposix\nmkdir\n(V" + os.fsencode(mark) + b"\ntR."
    assert len(attack) <= ref.size and pickle.dumps(sent, 5)
    bob.run(plant, planted, attack.ljust(ref.size, b".").hex())
    with PayloadClient(token=server.token, allow_pickle=True) as client:
        assert client.read(ref, deadline=DEADLINE_S) == sent
    assert not mark.exists()


def test_truncation_kills_no_reader(bob, server, planted):
    """Truncating a file that a reader has mapped would end it by SIGBUS."""
    ref = server.write(b"x" * 6000)
    bob.run(plant, planted, (b"y" * 6000).hex())
    with reader(server, "peeks") as process:
        first = read_by(process, ref)
        bob.run(truncate, planted)
        assert [first, read_by(process, ref)] == [b"x" * 6000] * 2
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(DEADLINE_S) == 0


def test_a_broken_mutex_kills_no_reader(bob, server, planted):
    """glibc asserts the state of a mutex, which would end a reader by SIGABRT."""
    ref = server.write(b"x" * 100)
    bob.run(plant_a_broken_mutex, planted, (b"y" * 100).hex())
    with reader(server, "claims") as process:
        assert read_by(process, ref) == b"x" * 100
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("kind", ["fifo", "folder", "socket", "link to a ring of alice"])
def test_no_kind_of_file_blocks_a_reader(bob, ring, server, planted, kind):
    """Another kind of file is neither waited for, nor followed, nor removed."""
    with SharedRing.create(SLOTS, SLOT_BYTES) as other:
        other.write_raw(b"another ring's")
        ref = server.write(b"the payload....")
        bob.run(plant_another, planted, kind, str(SHM / other.name))
        with PayloadClient(token=server.token) as client:
            assert bytes(client.read(ref, deadline=DEADLINE_S)) == b"the payload...."
        assert not {planted, other.name} & set(sweep())  # it may sweep dead rings of other tests
        assert os.path.lexists(SHM / planted)


def test_without_a_port_the_error_names_the_owner(bob, ring, planted):
    """Without a port there is no other way to the payload, so the read is an error."""
    ref = ring.write_raw(b"weights")
    bob.run(plant, planted, b"poison!".hex())
    with (
        PayloadClient() as client,
        pytest.raises(RingError, match=f"{SHM / planted} is not used: it belongs to user") as raised,
    ):
        client.read(ref, deadline=DEADLINE_S)
    assert "\n" not in str(raised.value)
    with pytest.raises(ForeignRing):
        SharedRing.attach(planted)


def test_his_rings_are_not_swept(bob, planted):
    """Their creator has ended, but only bob may remove them."""
    bob.run(plant, planted, b"his".hex())
    assert planted not in sweep()
    assert (SHM / planted).exists()


@pytest.mark.parametrize("mode", [0o640, 0o606, 0o660, 0o601])
def test_a_ring_that_other_users_may_open_is_refused(mode):
    """Alice owns the ring, but its mode has been widened."""
    with SharedRing.create(SLOTS, SLOT_BYTES) as ring:
        (SHM / ring.name).chmod(mode)
        with pytest.raises(ForeignRing, match=f"its mode {mode:04o} lets other users"):
            SharedRing.attach(ring.name)


def test_a_ring_under_a_second_name_is_refused(tmp_path):
    """Where the kernel allows it (fs.protected_hardlinks=0), bob can create a hard link to another ring of
    alice's."""
    with SharedRing.create(SLOTS, SLOT_BYTES, folder=tmp_path) as ring:
        (tmp_path / "nvrx-ring-1-1-abc").hardlink_to(tmp_path / ring.name)
        with pytest.raises(ForeignRing, match="it has 2 names"):
            SharedRing.attach("nvrx-ring-1-1-abc", folder=tmp_path)


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_a_umask_changes_no_ring(umask):
    """A ring has mode 0600 with any umask."""
    before = os.umask(umask)
    try:
        ring = SharedRing.create(SLOTS, SLOT_BYTES)
    finally:
        os.umask(before)
    with ring:
        assert (SHM / ring.name).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("size", [100, 3 << 20], ids=["small", "large"])
@pytest.mark.parametrize("how", ["client", "pickles", "ring", "view"])
def test_a_changed_payload_is_not_read_on_its_own_node(size, how):
    """A reader on the ring's own node checks the checksum of the ref too, and the payload stays."""
    with SharedRing.create(SLOTS, size) as ring:
        ref = ring.write_raw(bytes(size))
        ring.memory[Layout(SLOTS, size).payload_at(ref.slot) + size // 2] ^= 1
        with PayloadClient(allow_pickle=how == "pickles") as client, pytest.raises(TransportError, match="checksum"):
            if how == "view":
                with ring.view(ref):
                    pass
            elif how == "ring":
                ring.read(ref)
            else:
                client.read(ref, deadline=DEADLINE_S)
        assert ring.get_ready_count() == 1


def test_a_view_without_a_check():
    """`check=False` returns the bytes without verifying the checksum."""
    with SharedRing.create(SLOTS, 100) as ring:
        ref = ring.write_raw(bytes(100))
        ring.memory[Layout(SLOTS, 100).payload_at(ref.slot)] ^= 1
        with ring.view(ref, check=False) as payload:
            assert bytes(payload) == b"\x01" + bytes(99)
