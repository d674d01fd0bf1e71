"""The contract of the ledger of suspect nodes, on both of its storages: a file, and a real Redis."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from nvrx_slurm.attribution.blames import Blame, BlameKind
from nvrx_slurm.attribution.ledger import REDIS_KEY, FileStorage, Ledger, open_ledger, suspects_among
from nvrx_slurm.errors import NvrxError, StoreUnreachable, UnsafePath, UsageError, WaitTimeout
from nvrx_slurm.jobspec import env
from nvrx_slurm.store.embedded import EmbeddedStore
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.locks import locked
from tests import frozen_fs
from tests.contract.servers import PASSWORD
from tests.still_clock import StillClock

BLAMER = """
import sys
from nvrx_slurm.attribution.blames import Blame, BlameKind
from nvrx_slurm.attribution.ledger import open_ledger
where, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
ledger = open_ledger(where, cluster="alpha")
for number in range(count):
    ledger.blame([Blame(cluster="alpha", node=f"{name}-{number}", kind=BlameKind.SAID, failure="f", at=2e9)])
    print(number, flush=True)
"""


def blame(node: str = "n1", kind: BlameKind = BlameKind.HARDWARE, **changes: Any) -> Blame:
    at = SystemClock().wall()
    return Blame(**{"cluster": "alpha", "node": node, "kind": kind, "failure": "f1", "at": at} | changes)


class FileCase:
    """A file that does not exist yet, in a folder that does not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder / "state" / "suspects.json")

    def put(self, data: bytes) -> None:
        Path(self.where).parent.mkdir(exist_ok=True)
        Path(self.where).write_bytes(data)

    def set_aside(self) -> bytes:
        return Path(f"{self.where}.torn").read_bytes()


class RedisCase:
    """A Redis that requires a password."""

    def __init__(self, port: int) -> None:
        self.where = f"redis://127.0.0.1:{port}/0"
        self.client: Any = redis.Redis.from_url(self.where, password=PASSWORD)

    def put(self, data: bytes) -> None:
        self.client.set(REDIS_KEY, data)

    def set_aside(self) -> bytes:
        return bytes(self.client.get(f"{REDIS_KEY}:torn"))


Case = FileCase | RedisCase


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[int, int]]:
    """A real server's port and process id."""
    store = EmbeddedStore(tmp_path / "store", bind="127.0.0.1", password=PASSWORD)
    process = await store.start()
    yield store.port, process.pid
    process.kill()
    await process.wait()


@pytest.fixture(params=["file", "redis"])
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """Each storage, empty."""
    if request.param == "file":
        yield FileCase(tmp_path)
        return
    monkeypatch.setenv("NVRX_SLURM_STORE_PASSWORD", PASSWORD)
    found = RedisCase(request.getfixturevalue("server")[0])
    yield found
    found.client.close()


def ledger(case: Case, cluster: str = "alpha") -> Ledger:
    return open_ledger(case.where, cluster=cluster)


def names(case: Case, cluster: str = "alpha") -> list[str]:
    return [suspect.node for suspect in ledger(case, cluster).suspects()]


def test_what_one_job_blames_the_next_one_knows(case: Case) -> None:
    """The next job reads the blame with its evidence and the job that it is from."""
    assert names(case) == []
    noted = blame(fault="xid_79", job="/jobs/7", evidence="rank-3.err:7: Xid 79")
    ledger(case).blame([noted])
    (suspect,) = ledger(case).suspects()
    assert (suspect.node, suspect.blames) == ("n1", (noted,))


def test_two_clusters_share_a_ledger_and_no_node(case: Case) -> None:
    """Each cluster sees and clears only its own suspects."""
    ledger(case).blame([blame("n1"), blame("n2", cluster="beta")])
    assert (names(case, "alpha"), names(case, "beta")) == (["n1"], ["n2"])
    assert ledger(case, "beta").clear() == ("n2",)
    assert (names(case, "alpha"), names(case, "beta")) == (["n1"], [])


def test_a_node_that_is_cleared_is_suspect_no_more_and_the_others_are(case: Case) -> None:
    """`clear` returns the nodes that had blames, and the other nodes stay suspect."""
    ledger(case).blame([blame("n1"), blame("n2"), blame("n3", BlameKind.LOST)])
    assert ledger(case).clear("n2") == ("n2",)
    assert names(case) == ["n1"]
    assert ledger(case).clear("n2") == ()
    assert ledger(case).clear() == ("n1", "n3")


def test_a_clock_that_is_ahead_costs_no_other_blame(case: Case) -> None:
    """A job whose clock is ahead removes no blame of other jobs, and its own blame weighs no longer than theirs."""
    ledger(case).blame([blame("n1")])
    ahead = open_ledger(case.where, cluster="alpha", clock=StillClock(ahead_at(40)))
    ahead.blame([blame("n2", at=ahead_at(40))])
    assert set(names(case)) == {"n1", "n2"}
    assert ahead.clear("n9") == ()
    assert set(names(case)) == {"n1", "n2"}
    assert ledger(case).suspects(ahead_at(3)) == []


def ahead_at(days: float) -> float:
    return SystemClock().wall() + days * 86400.0


def test_blames_at_the_same_time_are_all_recorded(case: Case) -> None:
    """Four real processes write ten blames each."""
    jobs = [blamer(case, f"job{number}", 10) for number in range(4)]
    for job in jobs:
        assert job.wait() == 0
    assert len(names(case)) == 40


def test_a_writer_that_is_killed_leaves_a_whole_ledger(case: Case) -> None:
    """The ledger has every blame that the writer reported, and is not locked."""
    job = blamer(case, "job", 100_000)
    assert job.stdout is not None
    said = [int(job.stdout.readline()) for _ in range(5)]
    job.kill()
    job.wait()
    job.stdout.close()
    ledger(case).blame([blame("n1")])
    assert {f"job-{number}" for number in said} | {"n1"} <= set(names(case))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["writable", "link", "pipe"])
def test_a_file_that_others_may_have_put_there_is_refused(tmp_path: Path, kind: str) -> None:
    """Such a file is neither read nor waited for: a job starts without suspects, and a command's error names the
    file."""
    case, real = FileCase(tmp_path), tmp_path / "real.json"
    open_ledger(str(real), cluster="alpha").blame([blame("n1")])
    path = Path(case.where)
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(real)
    else:
        case.put(real.read_bytes())
        path.chmod(0o666)
    with pytest.raises(UnsafePath) as refused:
        ledger(case).suspects()
    assert refused.value.path == path
    with pytest.raises(UnsafePath):
        ledger(case).blame([blame("n2")])
    assert suspects_among(["n1"], where=case.where, cluster="alpha") == ()


@pytest.mark.parametrize(
    "data", [b"", b'{"blames": [{"clu', b"\xff\xfe", b"[]"], ids=["empty", "cut", "binary", "other"]
)
def test_a_torn_ledger_is_set_aside_and_replaced(case: Case, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """The log reports it, and the old content is kept."""
    case.put(data)
    assert names(case) == []
    ledger(case).blame([blame()])
    assert names(case) == ["n1"]
    if data or isinstance(case, FileCase):
        assert case.set_aside() == data
        assert "a new one starts" in caplog.text


def test_what_a_newer_version_has_noted_does_no_harm(case: Case) -> None:
    """An unknown field is ignored; a blame of an unknown kind is left out."""
    at = SystemClock().wall()
    case.put(
        b'{"blames": [{"cluster": "alpha", "node": "n1", "kind": "said", "failure": "f", "at": %f, "mood": 1},'
        b' {"cluster": "alpha", "node": "n2", "kind": "haunted", "failure": "f", "at": 1}], "version": 9}' % at
    )
    assert names(case) == ["n1"]


def test_the_suspects_of_an_allocation_are_in_its_order(case: Case) -> None:
    """Only suspects in the allocation are returned, and none where the cluster is unknown."""
    ledger(case).blame([blame("n1"), blame("n3"), blame("n9")])
    asked = ("n4", "n3", "n2", "n1")
    # The first import of a client is slow on a busy machine. The timeout itself has a test of its own.
    assert suspects_among(asked, where=case.where, cluster="alpha", timeout_s=30.0) == ("n3", "n1")
    assert suspects_among(asked, where=case.where, cluster="beta", timeout_s=30.0) == ()
    assert suspects_among(asked, where=case.where, cluster=None) == ()


def blamer(case: Case, name: str, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BLAMER, case.where, name, str(count)],
        stdout=subprocess.PIPE if count > 100 else subprocess.DEVNULL,
        env=env.child_environment({"NVRX_SLURM_STORE_PASSWORD": PASSWORD}),
        text=True,
    )


# ---- what only a file does


def test_a_file_is_its_owners_alone(tmp_path: Path) -> None:
    """Only the owner can read the file and its folder: other users do not see which nodes fail."""
    case = FileCase(tmp_path)
    ledger(case).blame([blame()])
    path = Path(case.where)
    assert [path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777] == [0o600, 0o700]


def test_a_lock_of_another_process_is_an_error_after_a_bound(tmp_path: Path) -> None:
    """The error names the lock file. Reads succeed meanwhile."""
    case = FileCase(tmp_path)
    ledger(case).blame([blame()])
    path, clock = Path(case.where), SystemClock()
    patient = Ledger(FileStorage(path, clock, lock_s=0.02), cluster="alpha", clock=clock)
    with locked(path.with_name("suspects.json.lock"), timeout_s=1.0, clock=clock) as is_locked:
        assert is_locked
        with pytest.raises(WaitTimeout, match=r"suspects\.json\.lock has been locked"):
            patient.blame([blame("n2")])
        assert names(case) == ["n1"]
    patient.blame([blame("n2")])
    assert set(names(case)) == {"n1", "n2"}


def test_a_place_that_no_file_can_have_is_one_error(tmp_path: Path) -> None:
    """The error names the path, and what to set."""
    (tmp_path / "file").write_text("")
    broken = open_ledger(str(tmp_path / "file" / "suspects.json"), cluster="alpha")
    for call in (lambda: broken.blame([blame()]), broken.suspects, broken.clear):
        with pytest.raises(UsageError, match=r"file/suspects\.json cannot be used .*--ledger"):
            call()


@pytest.mark.skipif(not frozen_fs.IS_HERE, reason="needs /dev/fuse")
def test_a_file_system_that_hangs_does_not_keep_a_job_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread waits for the file system in the background, and ends when the file system answers."""
    with frozen_fs.frozen(tmp_path):
        where = str(tmp_path / "suspects.json")
        assert suspects_among(("n1",), where=where, cluster="alpha", timeout_s=0.1) == ()
        assert "no answer within 0.1 s" in caplog.text
        own = [thread for thread in threading.enumerate() if thread.name == "suspects"]
        assert own
    for thread in own:
        thread.join(30.0)
        assert not thread.is_alive()


# ---- what only a Redis does


@pytest.mark.parametrize(
    ("where", "error", "words"),
    [
        ("redis://127.0.0.1:1/0", StoreUnreachable, r"127\.0\.0\.1:1/0 cannot be used"),
        ("redis://:hunter2@h/0", UsageError, "password"),
        ("redis://h/0?password=hunter2", UsageError, "password"),
        ("http://h/", UsageError, "redis://host"),
    ],
)
def test_a_place_that_no_redis_has_is_one_error(where: str, error: type[NvrxError], words: str) -> None:
    """The error never shows a password."""
    with pytest.raises(error, match=words) as caught:
        open_ledger(where, cluster="alpha").suspects()
    assert "hunter2" not in str(caught.value)
    assert suspects_among(("n1",), where=where, cluster="alpha", timeout_s=30.0) == ()


async def test_a_wrong_password_is_distinct_from_a_server_that_is_away(
    server: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused password is marked as refused, so that no client retries with it. A server that is away is not."""
    monkeypatch.setenv("NVRX_SLURM_STORE_PASSWORD", "hunter2")
    with pytest.raises(StoreUnreachable, match="NVRX_SLURM_STORE_PASSWORD") as caught:
        open_ledger(f"redis://127.0.0.1:{server[0]}/0", cluster="alpha").blame([blame()])
    assert caught.value.refused
    with pytest.raises(StoreUnreachable) as caught:
        open_ledger("redis://127.0.0.1:1/0", cluster="alpha").blame([blame()])
    assert not caught.value.refused


async def test_a_redis_that_is_frozen_does_not_keep_a_job_from_starting(
    server: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of a frozen server still accepts connections; the job starts without suspects."""
    monkeypatch.setenv("NVRX_SLURM_STORE_PASSWORD", PASSWORD)
    port, pid = server
    os.kill(pid, signal.SIGSTOP)
    try:
        assert suspects_among(("n1",), where=f"redis://127.0.0.1:{port}/0", cluster="alpha", timeout_s=0.1) == ()
    finally:
        os.kill(pid, signal.SIGCONT)
