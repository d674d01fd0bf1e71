"""A job whose store is the site's own."""

from __future__ import annotations

import os
import shutil
import signal

import msgspec
import pytest
import redis

from nvrx_slurm.errors import EXIT_USAGE
from nvrx_slurm.jobspec.model import StoreSpec
from nvrx_slurm.lab.faults.disk import SmallDisk
from nvrx_slurm.util.processes import is_alive
from tests.contract.inprocess_stores import PASSWORD, Valkey
from tests.harness import gate_plan
from tests.waiting import until

NEVER = -1


def test_job_runs_on_a_sites_own_store_and_leaves_it_clean(run_local, gate, tmp_path):
    """With `store.url` no server is started, two jobs of the same id share no key, and all keys expire by
    themselves."""
    server = Valkey(tmp_path / "site")
    try:
        two_jobs(run_local, gate, tmp_path, f"redis://127.0.0.1:{server.port}/0")
        with redis.Redis(port=server.port, password=PASSWORD) as client:
            keys = client.keys("*")
            assert len([key for key in keys if key.endswith(b"journal_n")]) == 2
            left_s = {key: client.ttl(key) for key in keys}
            assert NEVER not in left_s.values(), left_s
            lasting = [ttl_s for key, ttl_s in left_s.items() if not key.endswith(b":lease")]  # it may expire now
            assert all(0 < ttl_s <= 3600 for ttl_s in lasting), left_s
    finally:
        server.end()


def two_jobs(run_local, gate, tmp_path, url):
    plan = msgspec.structs.replace(gate_plan(gate, tmp_path, spares=0, workers=1), store=StoreSpec(url=url))
    jobs = []
    for name in ("a", "b"):
        there = msgspec.structs.replace(plan, folder=str(tmp_path / name))
        jobs.append(run_local(there, job_id="7", env={"NVRX_SLURM_STORE_PASSWORD": PASSWORD}))
        workers = gate.wait(2, cycle=0)
        assert not (jobs[-1].folder.path / "store").exists()
        for worker in workers.values():
            worker.go()
        assert jobs[-1].finish() == 0
        gate.forget()


def test_a_password_that_is_gone_by_the_jobs_start_ends_the_job(run_local, gate, tmp_path):
    """A password file may be removed while the job waits in the queue for days. The job's result names the setting,
    and its exit code is not that of a failed workload."""
    store = StoreSpec(url="redis://127.0.0.1:1/0", password_file=str(tmp_path / "gone"))
    job = run_local(msgspec.structs.replace(gate_plan(gate, tmp_path), store=store))
    assert job.finish() == EXIT_USAGE
    assert "store.password_file" in job.folder.read_result().reason


def test_job_waits_for_a_sites_disk_and_leaves_its_configuration_alone(run_local, gate, tmp_path):
    """While the site's server refuses writes no worker is touched. A failure meanwhile is handled once there is space
    again, and the server still has `appendonly yes`."""
    disk = SmallDisk("size=24m")
    server = Valkey(disk.path / "valkey")
    raw = redis.Redis(port=server.port, password=PASSWORD, decode_responses=True)
    try:
        plan = msgspec.structs.replace(
            gate_plan(gate, tmp_path, spares=0), store=StoreSpec(url=f"redis://127.0.0.1:{server.port}/0")
        )
        job = run_local(plan, env={"NVRX_SLURM_STORE_PASSWORD": PASSWORD})
        before = gate.wait(4, cycle=0)
        disk.fill()
        with pytest.raises(redis.ResponseError, match="MISCONF"):
            while True:
                raw.set("ballast", "x" * 10_000)
        os.kill(before[0].pid, signal.SIGKILL)
        until(lambda: "refuses writes" in job_logs(job), "the job to log what it waits for")
        assert all(is_alive(before[rank].pid) for rank in (2, 3))
        disk.free()
        gate.wait(4, cycle=1)
        assert raw.config_get("appendonly") == {"appendonly": "yes"}
        gate.open()
        assert job.finish() == 0
    finally:
        raw.close()
        server.end()
        disk.close()


@pytest.mark.parametrize("has_copy", [False, True], ids=["all of it", "the newest"])
def test_job_goes_on_when_a_sites_store_has_lost_its_data(run_local, gate, tmp_path, has_copy):
    """The site's store is killed, and starts without data or with an older copy: all agents join again, and the job
    ends with 0."""
    server = Valkey(tmp_path / "site")
    data, copy = tmp_path / "site" / "appendonlydir", tmp_path / "copy"
    try:
        store = StoreSpec(url=f"redis://127.0.0.1:{server.port}/0")
        plan = msgspec.structs.replace(gate_plan(gate, tmp_path), store=store)
        job = run_local(plan, env={"NVRX_SLURM_STORE_PASSWORD": PASSWORD})
        before = gate.wait(4, cycle=0)
        shutil.copytree(data, copy)
        os.kill(before[0].pid, signal.SIGKILL)
        before = gate.wait(4, cycle=1)
        server.kill()
        shutil.rmtree(data)
        if has_copy:
            shutil.copytree(copy, data)
        server.start()
        gate.wait(4, cycle=2)
        assert not any(is_alive(worker.pid) for worker in before.values())
        gate.open()
        assert job.finish() == 0
    finally:
        server.end()


def job_logs(job):
    files = [job.folder.job_log, *(job.folder.path / "nodes").glob("*.log")]
    return "".join(file.read_text(errors="replace") for file in files)
