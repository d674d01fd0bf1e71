"""A job whose store is the site's own."""

from __future__ import annotations

import asyncio
import signal

import msgspec
import redis

from nvrx_slurm.store.embedded import EmbeddedStore
from tests.harness import gate_plan

NEVER = -1


async def test_job_runs_on_a_sites_own_store_and_leaves_it_clean(run_local, gate, tmp_path):
    """With `store.url` no server is started; two jobs of the same id do not meet; all keys go by themselves."""
    server = EmbeddedStore(tmp_path / "site", bind="127.0.0.1", password="secret")
    process = await server.start()
    try:
        url = f"redis://127.0.0.1:{server.port}/0"
        await asyncio.to_thread(two_jobs, run_local, gate, tmp_path, url)
        with redis.Redis.from_url(url, password="secret") as client:
            keys = client.keys("*")
            assert len([key for key in keys if key.endswith(b"journal_n")]) == 2
            left_s = {key: client.ttl(key) for key in keys}
            assert NEVER not in left_s.values(), left_s
            lasting = [ttl_s for key, ttl_s in left_s.items() if not key.endswith(b":lease")]  # it may end now
            assert all(0 < ttl_s <= 3600 for ttl_s in lasting), left_s
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


def two_jobs(run_local, gate, tmp_path, url):
    plan = msgspec.structs.replace(gate_plan(gate, tmp_path, spares=0, workers=1), store_url=url)
    jobs = []
    for name in ("a", "b"):
        there = msgspec.structs.replace(plan, folder=str(tmp_path / name))
        jobs.append(run_local(there, job_id="7", env={"NVRX_SLURM_STORE_PASSWORD": "secret"}))
        workers = gate.wait(2, cycle=0)
        assert not (jobs[-1].folder.path / "store").exists()
        for worker in workers.values():
            worker.go()
        assert jobs[-1].finish() == 0
        gate.forget()
