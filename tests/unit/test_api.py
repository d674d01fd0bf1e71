"""The Python API for jobs: the parts that need no Slurm."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

import nvrx_slurm as nv
from nvrx_slurm.api.handle import Job
from nvrx_slurm.api.submission import check_store
from nvrx_slurm.cluster.local import LocalCluster
from nvrx_slurm.errors import ConfigError, MissingProgramError, StoreUnreachable, UsageError, WaitTimeout
from nvrx_slurm.jobspec.model import StoreSpec
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal.folder import JobFolder, JobInfo, Result
from nvrx_slurm.journal.records import Entry as JournalEntry
from nvrx_slurm.journal.records import JobStarted, entry_to_json
from nvrx_slurm.lab.plans import plain_bounds
from nvrx_slurm.store.acl import pattern_of_namespace, rule
from nvrx_slurm.util.clock import SystemClock
from tests.inprocess.servers import Valkey

JOB = """\
name: quick
command: [bash, -c, "echo rank $RANK"]
nodes: 2
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture
def ended_job(tmp_path: Path) -> JobFolder:
    """A job that ran on this machine and ended with 93."""
    job = JobFolder(tmp_path / "jobs" / "local-a")
    job.create()
    job.write_info(
        JobInfo(
            job_id="local-a",
            name="a",
            cluster="local",
            started_at=0.0,
            host=socket.gethostname(),
            host_pid=os.getpid(),  # the pid was reused since: it is the test process
            nodes=("n1", "n2"),
        )
    )
    job.write_result(Result(exit_code=93, reason="no progress", ended_at=1.0))
    role = RolePlan(name="main", command=("true",), nodes_per_replica=2)
    job.write_plan(
        Plan(name="a", roles=(role,), workdir="/", folder=str(job.path.parent), fault_tolerance=plain_bounds())
    )
    return job


def test_importing_the_package_loads_nothing_that_agents_and_workers_do_without() -> None:
    """Importing the package alone loads no heavy module; a public name is imported when it is first used."""
    code = "import sys, nvrx_slurm; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"nvrx_slurm"} == {name for name in loaded if name.startswith("nvrx_slurm")}
    assert not {"pydantic", "redis", "submitit", "asyncio", "typing"} & set(loaded) - _bare_modules()


def _bare_modules() -> set[str]:
    code = "import sys; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize("name", nv.__all__)
def test_each_public_name_is_there(name: str) -> None:
    """Each name of `__all__` can be imported, and tab completion finds it."""
    assert getattr(nv, name).__name__ == name
    assert name in dir(nv)


def test_any_other_name_is_not_there() -> None:
    """An unknown name raises AttributeError, as in any module."""
    with pytest.raises(AttributeError, match="no attribute 'jobb'"):
        nv.jobb  # noqa: B018 - the access is the test


@pytest.mark.parametrize("module", ["submitit", "redis", "stamina", "asyncio"])
def test_a_dry_run_of_submit_does_not_import(module: str, job_file: Path) -> None:
    """A dry run does not import the modules that submission does not need."""
    code = (
        f"import sys, nvrx_slurm.cli as c; c.cli(['submit', '--dry-run', {str(job_file)!r}], standalone_mode=False)"
    )
    code += f"; print({module!r} in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("#!/bin/bash")
    assert done.stderr == "False\n"


def test_an_ended_job_reports_how_it_ended(ended_job: JobFolder) -> None:
    """The job's folder is enough to read its state, exit code and nodes."""
    job = nv.job("local-a", folder=ended_job.path.parent)
    assert (job.done(), job.exit_code, job.wait(), job.state) == (True, 93, 93, nv.JobState.FAILED)
    assert job.nodes() == ("n1", "n2")
    assert job.folder == ended_job.path
    assert repr(job) == f"Job('local-a', folder='{ended_job.path.parent}', cluster='local')"


def test_an_ended_job_can_be_awaited(ended_job: JobFolder) -> None:
    """`awaitable().wait` returns the exit code, as with submitit's jobs."""
    job = nv.job("local-a", folder=ended_job.path.parent)
    assert asyncio.run(job.awaitable().wait(timeout=5)) == 93


def test_cancelling_an_ended_job_does_nothing(ended_job: JobFolder) -> None:
    """`cancel` sends no signal to a process that has reused the batch host's pid: here the test's own."""
    nv.job("local-a", folder=ended_job.path.parent).cancel()


def test_the_journal_and_the_logs_are_read_from_the_folder(ended_job: JobFolder) -> None:
    """A journal is read even if its writer died in the middle of a line."""
    entry = JournalEntry(n=1, t=1.5, record=JobStarted(job="local-a", name="a", expected=("n1",)))
    ended_job.events_path.write_bytes(entry_to_json(entry) + b'\n{"n": 2, "t"')
    logs = ended_job.cycle_logs("main-0", 0, 0)
    logs.mkdir(parents=True)
    (logs / "rank-1.out").write_text("one\n")
    (logs / "rank-1.err").write_text("two\n")
    ended_job.job_log.write_text("all\n")
    job = nv.job("local-a", folder=ended_job.path.parent)
    assert list(job.events()) == [entry]
    assert (job.logs(), job.logs(rank=1), job.logs(rank=1, stream="err")) == ("all\n", "one\n", "two\n")
    assert job.logs(stream="err") == "two\n"
    with pytest.raises(UsageError, match="rank 5"):
        job.logs(rank=5)
    with pytest.raises(UsageError, match="one of out, err, not 'both'"):
        job.logs(rank=1, stream="both")  # type: ignore[arg-type]


def test_a_wait_that_passes_its_bound_says_so(tmp_path: Path) -> None:
    """`wait` raises WaitTimeout, and the job keeps running."""
    job_id, process = LocalCluster(tmp_path).start("exec sleep 300\n", folder=tmp_path, detach=True)
    job = Job(job_id, folder=tmp_path, cluster="local")
    try:
        with pytest.raises(WaitTimeout, match=r"has not ended within 0\.2 s: it is RUNNING"):
            job.wait(timeout=0.2)
        assert process.poll() is None
        assert (job.done(), job.exit_code) == (False, None)
        job.cancel()
        process.wait(timeout=60)
        assert job.wait_until_gone(timeout=60) is nv.JobState.CANCELLED
        assert job.wait(timeout=60) == 143
    finally:
        process.kill()
        process.wait()


def test_an_unknown_job_is_one_error_that_names_the_known_ones(ended_job: JobFolder) -> None:
    """The error for a mistyped id lists the jobs that exist."""
    with pytest.raises(UsageError, match="local-a"):
        nv.job("local-b", folder=ended_job.path.parent)


@pytest.mark.parametrize("spares", [-1, True, 10**9, 1.5, "two", "3..1", "0..1000000000"])
def test_spares_that_make_no_sense_are_refused(job_file: Path, spares: int | str, tmp_path: Path) -> None:
    """The argument is checked like the key in job.yaml."""
    with pytest.raises(ConfigError, match="spares"):
        nv.submit(nv.load_job(job_file), spares=spares, folder=tmp_path / "jobs", cluster="local")
    assert not (tmp_path / "jobs").exists()


def test_without_slurm_submit_names_the_ways_on(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names `nvrx-slurm run`, and no folder is created."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingProgramError, match="nvrx-slurm run"):
        nv.submit(nv.load_job(job_file), folder=tmp_path / "jobs")
    assert not (tmp_path / "jobs").exists()


@pytest.fixture
def store_url(tmp_path: Path) -> Iterator[str]:
    """A real store with the password `right`."""
    store = Valkey(tmp_path / "store", "right")
    yield f"{store.url}/0"
    store.end()


async def test_the_store_is_tried_before_anything_is_submitted(
    job_file: Path, tmp_path: Path, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong and a missing password each raise one clear error before anything is submitted; no password is
    shown."""
    spec = nv.load_job(job_file, store__url=store_url)
    monkeypatch.setenv("PATH", str(tmp_path))
    for password, error, words in (
        ("wrong", StoreUnreachable, "refuses the password"),
        ("", StoreUnreachable, "refuses the password"),
        ("right", MissingProgramError, "sbatch"),
    ):
        monkeypatch.setenv("NVRX_SLURM_STORE_PASSWORD", password)
        with pytest.raises(error, match=words) as caught:
            await asyncio.to_thread(nv.submit, spec, folder=tmp_path / "jobs")
        assert not password or password not in str(caught.value).replace("password", "")
    assert not (tmp_path / "jobs").exists()


def read_only(admin: redis.Redis) -> dict[str, str]:
    admin.execute_command("REPLICAOF", "127.0.0.1", "1")
    return {}


def of_another_namespace(admin: redis.Redis) -> dict[str, str]:
    admin.execute_command(*rule("alice", pattern_of_namespace("bob")).replace(">PASSWORD", ">right").split())
    return {"user": "alice", "namespace": "alice"}


@pytest.mark.parametrize(("refuses", "why"), [(read_only, "read only"), (of_another_namespace, "ermission")])
def test_a_store_that_refuses_a_jobs_keys_is_an_error_before_anything_is_submitted(
    refuses: Callable[[redis.Redis], dict[str, str]],
    why: str,
    job_file: Path,
    tmp_path: Path,
    store_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job would find that out when Slurm starts it. The check leaves no key in a store that is accepted."""
    monkeypatch.setenv("NVRX_SLURM_STORE_PASSWORD", "right")
    with redis.Redis.from_url(store_url, password="right") as admin:
        check_store(StoreSpec(url=store_url, namespace="bob"))
        assert admin.dbsize() == 0
        differing = refuses(admin)
    url = store_url.replace("redis://", f"redis://{differing['user']}@") if differing else store_url
    spec = nv.load_job(job_file, store__url=url, store__namespace=differing.get("namespace"))
    with pytest.raises(StoreUnreachable, match=f"does not take a job's records .*({why})"):
        nv.submit(spec, folder=tmp_path / "jobs", cluster="local")
    assert not (tmp_path / "jobs").exists()


def test_a_silent_store_is_reported_before_anything_is_submitted(job_file: Path, tmp_path: Path) -> None:
    """The error has exit code 69, the address, and what to do."""
    spec = nv.load_job(job_file, store__url="redis://127.0.0.1:1/0")
    with pytest.raises(StoreUnreachable, match=r"127\.0\.0\.1:1/0 does not answer.*embedded") as caught:
        nv.submit(spec, folder=tmp_path / "jobs", cluster="local")
    assert caught.value.exit_code == 69
    assert not (tmp_path / "jobs").exists()


def test_a_password_file_that_is_missing_is_named(job_file: Path, tmp_path: Path) -> None:
    """`submit` reports it, before the job could fail on its batch host."""
    missing = str(tmp_path / "secret")
    spec = nv.load_job(job_file, store__url="redis://127.0.0.1:1/0", store__password_file=missing)
    with pytest.raises(ConfigError, match=r"secret.*cannot be read"):
        nv.submit(spec, folder=tmp_path / "jobs", cluster="local")


def test_a_job_submitted_to_this_machine_runs_to_its_end(job_file: Path, tmp_path: Path) -> None:
    """The whole way: load, submit, follow the journal, wait, read the logs."""
    job = nv.submit(nv.load_job(job_file), spares=1, folder=tmp_path / "jobs", cluster="local")
    events = [entry.record for entry in job.events(follow=True)]
    assert job.wait(timeout=60) == 0
    assert job.wait_until_gone(timeout=30) is nv.JobState.COMPLETED
    assert any(type(record).__name__ == "JobEnded" for record in events)
    assert job.logs(rank=1) == "rank 1\n"
    assert len(job.nodes()) == 3
    info = JobFolder(job.folder).read_info()
    assert info is not None
    assert info.started_at <= SystemClock().wall()
