"""What does not belong to this job is not changed: a site's server, another user's process, a folder outside the
base."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from nvrx_slurm.attribution.service.storage import StateFolder
from nvrx_slurm.cluster.local import LocalCluster
from nvrx_slurm.errors import FaultFailed, StoreUnreachable, UsageError
from nvrx_slurm.inprocess.exception import StoreError
from nvrx_slurm.inprocess.store_file import FileStore
from nvrx_slurm.inprocess.store_redis import RedisStore
from nvrx_slurm.journal.folder import JobFolder, JobInfo, StoreAddress
from nvrx_slurm.journal.records import NodeReady
from nvrx_slurm.lab.faults.disk import SmallDisk
from nvrx_slurm.lab.flow.stages.remote import Revocation, revoke
from nvrx_slurm.store.client import StoreClient
from nvrx_slurm.store.connection import RetryingRedis
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import boot_id, is_alive, started_ticks
from nvrx_slurm.util.redis_url import parse_redis_url
from nvrx_slurm.util.threads import in_thread
from tests.contract.inprocess_stores import PASSWORD, Valkey
from tests.waiting import until

LONG_S = 60.0
FACT = NodeReady(seq=1, node="n1", incarnation="i", replica="main-0", cycle=0, port=1)


class Site:
    """A site's own Valkey with an append-only file, on a disk of its own."""

    def __init__(self) -> None:
        self.disk = SmallDisk("size=16m")
        self.server = Valkey(self.disk.path / "valkey")
        self.url = f"redis://127.0.0.1:{self.server.port}"
        self._raw = redis.Redis(port=self.server.port, password=PASSWORD, decode_responses=True)

    def fill(self) -> None:
        """Fill the disk to the last byte, until the server refuses a write."""
        self.disk.fill()
        with pytest.raises(redis.ResponseError, match="MISCONF"):
            while True:
                self._raw.set("ballast", "x" * 10_000)

    def refusals(self) -> int:
        """How many commands the server has refused with MISCONF."""
        return int(self._raw.info("errorstats").get("errorstat_MISCONF", {}).get("count", 0))

    def keeps_a_file(self) -> bool:
        return self._raw.config_get("appendonly") == {"appendonly": "yes"}

    def set_user(self, name: str, *rules: str) -> None:
        self._raw.execute_command("ACL", "SETUSER", name, "on", f">{PASSWORD}", *rules)

    def end(self) -> None:
        self._raw.close()
        self.server.end()
        self.disk.close()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.end()


def of_an_agent(site: Site, patience_s: float, user: str = "") -> None:
    """A write by an agent or the controller."""

    async def write() -> None:
        url = f"redis://{user}127.0.0.1:{site.server.port}"
        address = StoreAddress(url=url, password=PASSWORD, job="j", token="t")
        store = StoreClient(address, clock=SystemClock(), patience_s=patience_s)
        try:
            await store.post(FACT)
        finally:
            await store.close()

    asyncio.run(write())


def of_an_in_process_group(site: Site, patience_s: float, user: str = "") -> None:
    store = RedisStore(
        url=f"redis://{user}127.0.0.1:{site.server.port}",
        password_file=str(site.server.password_file),
        patience=datetime.timedelta(seconds=patience_s),
    )
    with contextlib.closing(store.connect("group", 0)) as connection:
        connection.append(b"one", 0)


def of_a_payload_directory(site: Site, patience_s: float, user: str = "") -> None:
    url = f"redis://{user}127.0.0.1:{site.server.port}"
    client = RetryingRedis((parse_redis_url(url), PASSWORD), url, patience_s=patience_s, log=get_logger("transport"))
    try:
        client.ask(["XADD", "topic", "*", "m", "x"])
    finally:
        client.close()


Write = Callable[..., None]
every_client = pytest.mark.parametrize("write", [of_an_agent, of_an_in_process_group, of_a_payload_directory])


@every_client
def test_a_sites_server_whose_disk_is_full_keeps_its_configuration(site: Site, write: Write) -> None:
    """The append-only file stays on. The client retries a few times, gives up after its patience, and names the
    fix."""
    site.fill()
    before = site.refusals()
    with pytest.raises((StoreUnreachable, StoreError), match=r"redis://.* has refused writes .*Free space.*MISCONF"):
        write(site, 1.0)
    assert 3 <= site.refusals() - before <= 20  # an earlier version sent 5,590 in 3 s
    assert site.keeps_a_file()


@every_client
def test_a_write_goes_on_when_the_sites_disk_has_space_again(site: Site, write: Write) -> None:
    """The write succeeds once the disk has space."""
    site.fill()
    before = site.refusals()
    writing = in_thread(lambda: write(site, LONG_S), "writer")
    until(lambda: site.refusals() > before + 2, "the writer has been refused three times")
    site.disk.free()
    writing.result(LONG_S)
    assert site.keeps_a_file()


@every_client
def test_a_user_who_may_not_write_gets_an_immediate_error(site: Site, write: Write) -> None:
    """NOPERM is one clear error, raised without waiting for the patience of a minute."""
    site.set_user("reader", "~*", "+ping", "+xread", "+hello")
    with pytest.raises((StoreUnreachable, StoreError), match=r"refuses us.*ACL"):
        write(site, LONG_S, "reader@")


def test_no_flow_revokes_a_sites_password(site: Site, tmp_path: Path) -> None:
    """The fault `revoke_store_password` is only for an embedded store: a site's store has other users."""
    folder = JobFolder(tmp_path / "jobs" / "7")
    folder.create()
    folder.write_store(StoreAddress(url=site.url, password=PASSWORD, job="j", token="t"))
    with pytest.raises(FaultFailed, match="site's own"):
        revoke(Revocation(folder=str(folder.path)), SystemClock())
    with redis.Redis(port=site.server.port, password=PASSWORD) as client:
        assert client.ping()


# ---- folders that a user names


def long_ago(path: Path) -> None:
    os.utime(path, (1.0, 1.0))


def test_a_file_store_removes_only_what_a_file_store_has_made(tmp_path: Path) -> None:
    """`path` may contain other things: a folder with a file called `beats` in it is not taken for a group."""
    kept = ["music/song/beats", "music/12/beats", "music/12/notes.txt", "other/0/beats", "other/0/log/deep.txt"]
    for name in kept:
        file = tmp_path / name
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_text("mine")
        long_ago(file)
    gone = FileStore(path=tmp_path).connect("abandoned", 0)
    gone.append(b"one", 0)
    long_ago(tmp_path / "abandoned" / "0" / "beats")
    connection = FileStore(path=tmp_path).connect("group", 0)
    assert not (tmp_path / "abandoned").exists()
    (tmp_path / "group" / "0" / "mine.txt").write_text("mine")
    connection.clear()
    assert [path.name for path in (tmp_path / "group" / "0").iterdir()] == ["mine.txt"]
    assert all((tmp_path / name).read_text() == "mine" for name in kept)


def test_a_state_folder_keeps_the_users_own_hidden_files(tmp_path: Path) -> None:
    """`attrsvc --state-dir ~` removes files that it has half written, and no other file whose name begins with a
    dot."""
    for name in (".bashrc", ".ssh.json.1", f".{'a' * 32}.json.0badcafe"):
        (tmp_path / name).write_text("x")
    assert StateFolder(tmp_path).load() == {}
    assert {path.name for path in tmp_path.iterdir()} == {".bashrc", ".ssh.json.1"}


# ---- processes that a file names


@pytest.fixture
def base(common: Path) -> Path:
    """A project's base folder: every user may create job folders there, and none may remove those of another user."""
    base = common / "jobs"
    base.mkdir()
    base.chmod(0o1777)
    return base


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of alice's that does not belong to any job."""
    process = subprocess.Popen(["sleep", "300"])
    yield process
    process.kill()
    process.wait()


def described(job_id: str, pid: int, *, exact: bool = True) -> dict[str, object]:
    """A job.json that names a process. With `exact` it has the process's start time and boot id, as now, which every
    user can read in /proc; older versions wrote only the time."""
    fields = {"job_id": job_id, "name": "mine", "cluster": "local", "host": socket.gethostname(), "host_pid": pid}
    fields |= {"started_at": SystemClock().wall()}
    return fields | ({"host_began": started_ticks(pid), "host_boot": boot_id()} if exact else {})


def plant(folder: str, info: dict[str, object]) -> None:
    job = Path(folder)
    job.mkdir(mode=0o755)
    (job / "job.json").write_text(json.dumps(info))
    (job / "plan.json").write_text("{}")


def cli(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-P", "-m", "nvrx_slurm", *words]
    return subprocess.run(program, cwd=cwd, capture_output=True, text=True, timeout=LONG_S)


def assert_one_clear_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Assert exit code 2 and one line of error without a traceback."""
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "older"])
def test_a_foreign_job_json_ends_no_process_of_alice(bob, base: Path, victim, exact: bool) -> None:
    """Bob's job.json names a process of alice's, and alice cancels that "job"."""
    bob.run(plant, str(base / "local-evil"), described("local-evil", victim.pid, exact=exact))
    done = cli("cancel", "local-evil", "--folder", str(base), cwd=base)
    assert_one_clear_line(done, "local-evil", str(bob.uid))
    assert is_alive(victim.pid)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "older"])
def test_a_copy_of_a_foreign_job_json_ends_no_process(bob, base: Path, tmp_path: Path, victim, exact: bool) -> None:
    """Alice has copied bob's folder: the file is hers, and so is the process, but the process does not run this
    job."""
    bob.run(plant, str(base / "local-evil"), described("local-evil", victim.pid, exact=exact))
    mine = tmp_path / "jobs"
    mine.mkdir(mode=0o700)
    (mine / "local-evil").mkdir(mode=0o700)
    for name in ("job.json", "plan.json"):
        shutil.copyfile(base / "local-evil" / name, mine / "local-evil" / name)
        (mine / "local-evil" / name).chmod(0o600)
    done = cli("cancel", "local-evil", "--folder", str(mine), cwd=mine)
    assert_one_clear_line(done, "does not run this job")
    assert is_alive(victim.pid)


def test_a_later_process_of_the_same_number_is_left_alone(tmp_path: Path) -> None:
    """A process with the same pid that began at another tick or after another boot gets no signal, even if it is of
    the same job. The job counts as ended."""
    process = subprocess.Popen(["sleep", "300"], env={**os.environ, "NVRX_JOB_ID": "local-a"})
    try:
        job = JobFolder(tmp_path / "local-a")
        job.create()
        info = {**described("local-a", process.pid), "addr": "127.0.0.1"}
        for change in ({"host_began": 1}, {"host_boot": "another"}):
            job.write_info(JobInfo(**{**info, **change}))
            LocalCluster(tmp_path).cancel("local-a")
            assert is_alive(process.pid)
        job.write_info(JobInfo(**info))
        LocalCluster(tmp_path).cancel("local-a")
        assert process.wait(LONG_S) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()


# ---- job ids that are paths

HOSTILE_IDS = ["../x", "../../etc", "/etc", "a/b", ".", "..", "", "x\n", "-x", "1;../y", "\x1b[31m", "x" * 300]


@pytest.mark.parametrize("command", ["wait", "cancel", "status", "logs", "events", "explain", "dump"])
def test_a_job_id_is_no_path(tmp_path: Path, command: str) -> None:
    """A job outside the base folder cannot be reached: exit code 2, and its files are not changed."""
    outside = tmp_path / "x"
    plant(str(outside), described("x", os.getpid()))
    base = tmp_path / "jobs"
    base.mkdir(mode=0o700)
    before = sorted((path, path.stat().st_mtime_ns) for path in outside.iterdir())
    done = cli(command, "../x", "--folder", str(base), cwd=tmp_path)
    assert_one_clear_line(done, "'../x' is no job id", "--folder")
    assert sorted((path, path.stat().st_mtime_ns) for path in outside.iterdir()) == before


def test_the_path_of_a_job_is_answered_with_what_to_type(tmp_path: Path) -> None:
    """Messages print such paths, and shells add the trailing slash: the error names the job id and the --folder to
    use."""
    done = cli("explain", f"{tmp_path}/17_4/", cwd=tmp_path)
    assert_one_clear_line(done, f"'{tmp_path}/17_4/' is no job id", f"17_4 --folder {tmp_path}")


@pytest.mark.parametrize("job_id", HOSTILE_IDS)
def test_python_takes_no_path_for_a_job_id_either(tmp_path: Path, job_id: str) -> None:
    """`job`, `Job` and `LocalCluster` have the same check."""
    import nvrx_slurm as nv

    with pytest.raises(UsageError, match="is no job id"):
        nv.job(job_id, folder=tmp_path)
    with pytest.raises(UsageError, match="is no job id"):
        nv.Job(job_id, folder=tmp_path, cluster="local")
    with pytest.raises(UsageError, match="is no job id"):
        LocalCluster(tmp_path).cancel(job_id)


@pytest.mark.parametrize(
    ("job_id", "folder"),
    [("123", "123"), ("123_4", "123_4"), ("123+0", "123+0"), ("123_4;alpha", "123_4"), ("local-2026-4f2a",) * 2],
)
def test_ids_of_slurm_and_of_local_jobs_are_taken(tmp_path: Path, job_id: str, folder: str) -> None:
    """The ids of a job, of an array's element, of a component of a heterogeneous job, with a cluster's name, and of a
    local job."""
    import nvrx_slurm as nv

    assert nv.Job(job_id, folder=tmp_path, cluster="slurm").folder == tmp_path / folder
