"""Store or controller freezes, dies, or cannot come back: no worker is touched, or the job ends with a reason."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import redis

from nvrx_slurm.agent.supervisor import descendants
from nvrx_slurm.journal.records import ControllerStarted, NodeLost, RendezvousOpened, Shutdown
from nvrx_slurm.store.redis_client import client
from nvrx_slurm.util.processes import is_alive
from tests.fault_harness import child_of
from tests.harness import gate_plan, wait_gone
from tests.waiting import until

QUICK = {"heartbeat__interval": 0.2, "heartbeat__timeout": 3.0}


def control_plane(job):
    return {name: child_of(job.process.pid, name) for name in ("valkey-server", "nvrx_slurm.controller")}


def stays_whole(job, gate, before):
    """Assert that no node was declared dead and no worker was touched, and that a failure from now on is handled."""
    assert all(is_alive(worker.pid) for worker in before.values())
    os.kill(before[0].pid, signal.SIGKILL)
    gate.wait(4, cycle=1)
    gate.open()
    assert job.finish() == 0
    assert job.said(NodeLost) == []
    assert [record.cycle for record in job.said(RendezvousOpened)] == [0, 1]


def test_frozen_store_or_controller_or_killed_store_costs_no_worker_and_no_node(run_local, gate, tmp_path):
    """Store and controller are each stopped for far longer than the heartbeat timeout, then continued: no node is
    declared dead. The store is killed three times and comes back each time with all its data: the journal has no
    gap."""
    job = run_local(gate_plan(gate, tmp_path, **QUICK))
    before = gate.wait(4, cycle=0)
    job.all_joined("n1", "n2", "n3")
    for victim in control_plane(job).values():
        beats = node_beats(job)
        os.kill(victim, signal.SIGSTOP)
        pause(job, seconds=10.0)
        os.kill(victim, signal.SIGCONT)
        until(lambda: node_beats(job) > beats, "heartbeats to arrive again")  # noqa: B023  called at once
        assert all(is_alive(worker.pid) for worker in before.values())
    for _ in range(3):
        victim = control_plane(job)["valkey-server"]
        os.kill(victim, signal.SIGKILL)
        wait_gone([victim])
        beats = until(lambda: node_beats(job), "the store is back")
        until(lambda: node_beats(job) > beats, "heartbeats to arrive again")  # noqa: B023  called at once
    stays_whole(job, gate, before)
    assert [entry.n for entry in job.entries] == list(range(1, len(job.entries) + 1))


def test_store_that_is_killed_while_it_starts_is_started_once_more(run_local, gate, tmp_path):
    """A store that is killed twice while it starts, before it is ready to serve, is started again: the job goes
    on."""
    job = run_local(gate_plan(gate, tmp_path, **QUICK))
    before = gate.wait(4, cycle=0)
    killed = {control_plane(job)["valkey-server"]}
    os.kill(*killed, signal.SIGKILL)
    while len(killed) < 3:
        for pid in set(stores_of(job)) - killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    until(lambda: "the store did not start" in job.folder.job_log.read_text(), "a start fails")
    until(lambda: node_beats(job), "the store is back")
    stays_whole(job, gate, before)


def stores_of(job):
    """The store processes below the batch host, including one that has just been started."""
    children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    for pid in map(int, children):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/exe").readlink().name == "valkey-server":
                yield pid


def test_store_that_cannot_come_back_ends_the_job(run_local, gate, tmp_path):
    """A killed store that cannot start again (its folder is gone) ends the job with 69. The reason is on file, and no
    process is left."""
    job = run_local(gate_plan(gate, tmp_path, nodes=1, spares=0, **QUICK))
    gate.wait(2, cycle=0)
    everybody = descendants(job.process.pid)
    job.process.send_signal(signal.SIGSTOP)  # else it restarts the store before the folder is replaced
    os.kill(control_plane(job)["valkey-server"], signal.SIGKILL)
    shutil.rmtree(job.folder.store_dir)
    job.folder.store_dir.write_text("no folder any more")
    job.process.send_signal(signal.SIGCONT)
    assert job.finish() == 69
    wait_gone(everybody)
    result = job.folder.read_result()
    assert result.exit_code == 69
    assert "store" in result.reason


def test_controller_that_the_store_refuses_ends_the_job(run_local, gate, tmp_path):
    """The store's password is changed and the controller dies. The store refuses the next controller, and the job
    ends at once with 69 instead of starting one controller after the other. The controller's log says why."""
    job = run_local(gate_plan(gate, tmp_path, nodes=1, spares=0, **QUICK))
    gate.wait(2, cycle=0)
    everybody = descendants(job.process.pid)
    address = job.folder.read_store()
    with client(address, connect_s=5.0, answer_s=5.0) as store:
        store.execute_command("ACL", "SETUSER", "default", "resetpass", ">another")
    os.kill(control_plane(job)["nvrx_slurm.controller"], signal.SIGKILL)
    assert job.finish() == 69
    wait_gone(everybody)
    assert "store" in job.folder.read_result().reason
    assert "refuses us" in job.folder.node_log("controller").read_text()


def test_store_that_refuses_all_clients_once_the_end_was_decided(run_local, gate, tmp_path):
    """All work is done, and the job's end waits for a frozen agent. Then the store's password is changed: the job
    still ends with the exit code and the reason that were decided."""
    job = run_local(gate_plan(gate, tmp_path, nodes=1, heartbeat__interval=0.2, heartbeat__timeout=60.0))
    gate.wait(2, cycle=0)
    everybody = descendants(job.process.pid)
    os.kill(job.agent_pid("n2"), signal.SIGSTOP)
    gate.open()
    job.expect(Shutdown)
    address = job.folder.read_store()
    with client(address, connect_s=5.0, answer_s=5.0) as store:
        store.execute_command("ACL", "SETUSER", "default", "resetpass", ">another")
        store.execute_command("CLIENT", "KILL", "TYPE", "normal")
    assert job.finish() == 0
    wait_gone(everybody)
    assert job.folder.read_result().reason == "done"


def test_node_that_dies_with_the_controller_is_given_up_in_time(run_local, gate, tmp_path):
    """A node dies while no controller runs. The next controller declares it dead after the heartbeat timeout, not
    after the startup timeout."""
    job = run_local(gate_plan(gate, tmp_path, heartbeat__startup_timeout=1000.0, **QUICK))
    gate.wait(4, cycle=0)
    job.all_joined("n1", "n2", "n3")
    job.process.send_signal(signal.SIGSTOP)
    os.kill(control_plane(job)["nvrx_slurm.controller"], signal.SIGKILL)
    job.kill_node("n2")
    job.process.send_signal(signal.SIGCONT)
    job.expect(ControllerStarted, epoch=2)
    job.expect(NodeLost, node="n2")
    gate.wait(4, cycle=1)
    gate.open()
    assert job.finish() == 0


def test_control_plane_gone_for_longer_than_its_grace_ends_the_workers(run_local, gate, tmp_path):
    """Agents whose controller is silent for longer than `control_plane_grace` stop their workers and exit, so that no
    worker runs unsupervised for ever."""
    bounds = {"control_plane_grace": 3.0, "teardown__grace": 1.0, **QUICK}
    job = run_local(gate_plan(gate, tmp_path, nodes=1, spares=0, **bounds))
    before = gate.wait(2, cycle=0)
    os.kill(control_plane(job)["nvrx_slurm.controller"], signal.SIGSTOP)
    wait_gone([worker.pid for worker in before.values()])
    assert job.finish(timeout=60.0) in (69, 75)


def node_beats(job):
    """How many heartbeats the store has received so far; 0 while it does not answer."""
    address = job.folder.read_store()
    try:
        with client(address, connect_s=5.0, answer_s=5.0) as store:
            return int(store.xinfo_stream(f"nvrx:{{{address.job}}}:beats")["entries-added"])
    except (redis.RedisError, OSError):
        return 0


def pause(job, seconds):
    """The fault itself takes this long; meanwhile the job must not end."""
    with pytest.raises(subprocess.TimeoutExpired):
        job.process.wait(seconds)
