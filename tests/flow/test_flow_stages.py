"""The faults of flows, each on a real job: an injected fault has a proof, and one that cannot happen is an error."""

from __future__ import annotations

import json
import os
import time

import pytest

from nvrx_slurm.errors import ConfigError, FaultFailed
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import (
    ControllerStarted,
    Entry,
    JobEnded,
    NodeJoined,
    NodeLost,
    RendezvousClosed,
    WorkersStarted,
)
from nvrx_slurm.lab.devcluster import DevCluster
from nvrx_slurm.lab.flow.load import ClusterNeeds
from nvrx_slurm.lab.flow.model import Fault, Flow, OnState
from nvrx_slurm.lab.flow.stages import check, open_stage
from nvrx_slurm.lab.flow.stages.faults import Scene
from nvrx_slurm.lab.flow.stages.processes import described, processes_of
from nvrx_slurm.lab.flow.topology import JobTopology
from nvrx_slurm.util.processes import is_alive
from tests.harness import WAIT_S, wait_gone
from tests.waiting import until

QUICK = {"heartbeat": {"interval": "500ms", "timeout": "3s"}, "fence_timeout": "5s", "teardown": {"grace": "2s"}}


class Held:
    """Records what an attempt would have to end."""

    def __init__(self):
        self.things = []

    def cluster(self, name):
        self.things.append(name)

    def job(self, job):
        self.things.append(job.job_id)

    def process(self, pid):
        self.things.append(pid)


def flow_of(gate, folder, *, nodes=2, spares=1, faults=(), stages=("local", "dev", "slurm"), job=None, **needs):
    """A flow whose job has one gate worker a node."""
    path = folder / "job.yaml"
    path.write_text(
        json.dumps(
            {"name": "struck", "command": list(gate.command), "nodes": nodes, "spares": spares, "workers_per_node": 1}
            | {"fault_tolerance": QUICK}
            | (job or {})
        )
    )
    return Flow(
        name="struck",
        about="",
        file=folder / "flow.yaml",
        job=path,
        overrides=(),
        on=stages,
        nodes=nodes + spares,
        cluster=ClusterNeeds(**needs),
        faults=tuple(faults),
        expect=(),
        wall_s=120.0,
        lines={},
    )


class Played:
    """A job on a stage, as an attempt follows it."""

    def __init__(self, stage, flow):
        self.stage = stage
        self.job = stage.submit(flow)
        self.folder = JobFolder(self.job.folder)
        self.world = JobTopology(self.folder.read_plan())
        self.journal = stage.journal(self.folder)
        self.entries, self.beats, self.bindings = [], [], {}

    def follow(self, wait_s=0.2):
        for item in self.journal.poll(wait_s):
            if isinstance(item, Entry):
                self.entries.append(item)
                self.world.feed(item)
            else:
                self.beats.append(item)

    def await_(self, kind, **fields):
        """The first record of this kind with these fields; waits for it."""
        deadline = time.monotonic() + WAIT_S
        while True:
            for entry in self.entries:
                record = entry.record
                if isinstance(record, kind) and all(getattr(record, key) == value for key, value in fields.items()):
                    return entry
            assert time.monotonic() < deadline, f"no {kind.__name__} {fields}: {[e.record for e in self.entries]}"
            self.follow()

    def inject(self, action, **arguments):
        scene = Scene(self.job, self.folder, self.world, self.bindings)
        return self.stage.inject(action, arguments, scene)

    def end(self):
        """Wait for the end of the job, assert that nothing is left of it, and return its exit code."""
        code = self.job.wait(WAIT_S)
        self.close()
        assert self.stage.gone(self.job, WAIT_S) == []
        print(f"ended: {code}, {self.folder.read_result()}")
        return code

    def close(self):
        self.journal.close()


@pytest.fixture
def play(gate, tmp_path, monkeypatch):
    """Opens a stage, submits a job to it, and waits until all nodes have joined. Teardown ends the job and the
    stage."""
    opened = []

    def play(name, **options):
        flow = flow_of(gate, tmp_path, **options)
        stage = open_stage(flow, name, tmp_path, Held())
        opened.append(stage)
        for variable, value in stage.environment.items():
            monkeypatch.setenv(variable, value)
        return joined(Played(stage, flow), flow.nodes)

    yield play
    for stage in opened:
        if stage.job is not None and not stage.job.done():
            stage.cancel(stage.job)
            stage.gone(stage.job, WAIT_S)
        stage.close()


def joined(played, nodes, generation=0):
    for node in range(1, nodes + 1):
        played.await_(NodeJoined, node=f"n{node}", generation=generation)
    return played


def runs(played, gate, *, cycle, count=2, generation=0):
    """The workers of that cycle, once the journal has their start."""
    closed = played.await_(RendezvousClosed, cycle=cycle, generation=generation).record
    for node in closed.nodes:
        played.await_(WorkersStarted, cycle=cycle, node=node, generation=generation)
    return gate.wait(count, cycle=cycle, generation=generation)


def fault(action, line, **arguments):
    return Fault(number=1, line=line, when=OnState("running"), action=action, arguments=arguments)


def store_runs(played):
    return any(described(pid).startswith("store") for pid in processes_of(played.job.folder))


def failure(played, action, **arguments):
    with pytest.raises(FaultFailed) as raised:
        played.inject(action, **arguments)
    return str(raised.value)


def test_faults_hit_the_processes_that_they_name(play, gate):
    """All processes of a local node are stopped and continued at once, then killed at once, and a spare takes over. A
    target that does not exist is an error that names what exists. Workers, an agent, a supervisor, the controller and
    the store, named by rank, by node or as a spare, are stopped, continued or killed; new ones replace them, and the
    job ends with 0."""
    played = play("local", spares=2)
    runs(played, gate, cycle=0)
    assert failure(played, "kill_worker", rank=2) == "main-0 has no rank 2: its world has 2 ranks now"
    assert failure(played, "kill_agent", node="n7") == "the job has no node 'n7': it has n1, n2, n3, n4"
    assert failure(played, "kill_agent", spare=3) == "there is no hot spare 3: on standby now: n3, n4"
    assert failure(played, "kill_agent", node="$dead") == "$dead has no value yet (bound so far: none)"
    assert failure(played, "drain_node", node="n1") == "drain_node cannot be done on the stage local"
    assert failure(played, "restore_node", node="n2") == (
        "all that the job runs on n2 is not stopped: there is nothing to continue"
    )
    assert "in state T" in played.inject("stop_node", of_rank=1).proof
    assert "out of state T" in played.inject("restore_node", node="n2").proof
    played.bindings["lost"] = played.inject("kill_node", of_rank=1).bound
    assert "has ended already" in failure(played, "kill_node", node="$lost")

    first = runs(played, gate, cycle=1)
    hit = played.inject("stop_worker", rank=1)
    assert hit.bound == 1
    assert f"process {first[1].pid} is in state T" in hit.proof
    assert "out of state T" in played.inject("continue_worker", rank=1).proof
    controller = played.world.controller
    assert "state T" in played.inject("stop_controller").proof
    assert "out of state T" in played.inject("continue_controller").proof
    assert "gone" in played.inject("kill_controller").proof
    assert not is_alive(controller)
    played.await_(ControllerStarted, epoch=2)
    assert "gone" in played.inject("kill_store").proof
    assert played.inject("kill_supervisor", of_rank=0).bound == "n1"
    wait_gone([first[0].pid])
    again = runs(played, gate, cycle=2)
    hit = played.inject("kill_worker", of_node=again[1].env["NVRX_NODE"])
    assert (hit.bound, is_alive(again[1].pid)) == (1, False)
    runs(played, gate, cycle=3)
    spare = played.world.standby[0]
    assert played.inject("kill_agent", spare=1).bound == spare
    played.await_(NodeLost, node=spare)
    gate.open()
    assert played.end() == 0


def test_batch_host_takes_the_signals_that_scancel_sends(play, gate):
    """On a local job, the fault `scancel` sends SIGTERM to the batch host, and the job ends with 143. Before that,
    `gone` names each process that still runs."""
    played = play("local")
    runs(played, gate, cycle=0)
    left = " ".join(played.stage.gone(played.job, 0.0))
    assert all(f"{who}, pid " in left for who in ("batch host", "agent on n3", "controller", "store", "rank 1 on n2"))
    assert "took SIGTERM" in played.inject("scancel").proof
    assert played.end() == 143


def test_killed_batch_host_takes_all_along(play, gate):
    """When the batch host is killed, the control plane dies with it and the agents leave: no process is left."""
    played = play("local", nodes=1, spares=0)
    runs(played, gate, cycle=0, count=1)
    assert "the batch host" in played.inject("kill_batch_host").proof
    assert played.end() == 75


def test_disk_is_filled_and_the_stores_password_is_revoked(play, gate):
    """The disk is filled to the last byte, by statvfs, and freed again. The store refuses the old password until it
    is killed and starts again with that password. The job goes on."""
    played = play("local", nodes=1, spares=0, disk=4 << 20)
    runs(played, gate, cycle=0, count=1)
    assert "nothing to free" in failure(played, "free_disk")
    assert played.inject("fill_disk").proof == "statvfs says that 0 bytes are free"
    played.inject("free_disk")
    assert "the store refuses the old password" in played.inject("revoke_store_password").proof
    assert "gone" in played.inject("kill_store").proof
    until(lambda: store_runs(played), "the store to run again")
    gate.open()
    assert played.end() == 0


def test_link_of_a_node_is_slowed_cut_and_healed(play, gate, tmp_path):
    """On nodes with networks of their own, one link is slowed and another cut; the node that is cut off loses its
    ranks, and both links are healed. Heartbeats and journal are read from inside the network all the while."""
    (tmp_path / "go").touch()
    command = ["sh", "-c", "while test -e go; do sleep 0.1; done"]
    played = play("local", network="own", job={"command": command, "workdir": str(tmp_path)})
    for node in ("n1", "n2"):
        played.await_(WorkersStarted, node=node)
    assert "nothing to heal" in failure(played, "heal_link", of_rank=1)
    hit = played.inject("slow_link", of_rank=0, delay=0.05, loss=0.01)
    assert (hit.bound, hit.proof) == ("n1", "the switch says that it slows n1: 0.05 s late, 1% lost")
    assert "cuts off n2" in played.inject("cut_link", of_rank=1).proof
    played.await_(NodeLost, node="n2")
    played.await_(RendezvousClosed, cycle=1, nodes=("n1", "n3"))
    played.inject("heal_link", node="n2")
    played.inject("heal_link", node="n1")
    assert {heard.heartbeat.node for heard in played.beats} == {"n1", "n2", "n3"}
    assert "the store refuses" in played.inject("revoke_store_password").proof
    (tmp_path / "go").unlink()
    assert played.end() == 0


@pytest.fixture(scope="module")
def site():
    """A Slurm in the role of a site's own."""
    with DevCluster.up(name=f"test-site-{os.getpid()}", nodes=3) as cluster:
        yield cluster


@pytest.mark.slurm
def test_nodes_of_a_development_cluster_die_freeze_and_come_back(play, gate):
    """The ranks of a killed node and of a frozen node move to spares. Slurm uses both nodes again once they are
    restored. A node that the cluster does not have is an error that names it, also while the job is pending."""
    played = play("dev", spares=2)
    runs(played, gate, cycle=0)
    pending = Scene(played.job, played.folder, JobTopology(played.folder.read_plan()), {})  # it has no node yet
    with pytest.raises(FaultFailed, match="has no node 'n9'; it has n1, n2"):
        played.stage.inject("kill_node", {"node": "n9"}, pending)
    hit = played.inject("kill_node", of_rank=1)
    assert (hit.bound, played.stage.cluster.node_processes("n2")) == ("n2", [])
    runs(played, gate, cycle=1)
    assert "in state T" in played.inject("stop_node", node="n3").proof
    runs(played, gate, cycle=2)
    assert "slurmd of n3 lives" in played.inject("restore_node", node="n3").proof
    assert "slurmd of n2 lives" in played.inject("restore_node", node="n2").proof
    gate.open()
    assert played.end() == 0


@pytest.mark.slurm
def test_slurm_drains_a_node_gives_it_up_and_takes_it_back(play, gate):
    """The proof is Slurm's own answer: for a node that is drained, resumed or down, and for a shortened time
    limit."""
    played = play("dev", faults=[fault("down_node", 1, of_rank=1)], job={"slurm": {"time": "10m"}})
    runs(played, gate, cycle=0)
    assert "TimeLimit=00:02:00" in played.inject("shorten_time_limit", to=90.0).proof
    assert "n3 is draining" in played.inject("drain_node", spare=1).proof
    assert played.inject("resume_node", node="n3").bound == "n3"
    assert "n2 is down" in played.inject("down_node", of_rank=1).proof
    played.await_(NodeLost, node="n2")
    assert played.stage.gone(played.job, 0.0) == ["squeue still lists job 1: RUNNING"]
    played.inject("kill_batch_host")
    assert played.end() == 1  # to Slurm, a job whose script was killed has failed


@pytest.mark.slurm
def test_job_is_preempted_requeued_and_cancelled(play, gate):
    """A job of higher priority takes the nodes, without settings in the flow. After `release` the flow's job runs
    again at once, after `requeue` it is back in the queue, after `scancel` it ends."""
    played = play("dev", nodes=1, spares=0, faults=[fault("preempt", 1)])
    runs(played, gate, cycle=0, count=1)
    assert "came first" in played.inject("preempt").proof
    played.await_(JobEnded)
    assert "restarted 1 times" in played.inject("release").proof
    joined(played, 1, generation=1)
    runs(played, gate, cycle=0, count=1, generation=1)
    assert "EndTime=" in played.inject("shorten_time_limit", to=0).proof
    assert played.inject("requeue").proof.startswith("job 1 is ")
    assert "Slurm says that job 1 is" in played.inject("scancel").proof
    played.end()


@pytest.mark.slurm
def test_on_a_sites_slurm_a_step_of_the_job_injects_the_faults(play, gate, site, monkeypatch, tmp_path):
    """The owner of a job may run one more step in it: that step sends the signals and returns their proofs, also for
    all processes of a node at once."""
    for variable, value in site.environment().items():
        monkeypatch.setenv(variable, value)
    played = play("slurm")
    first = runs(played, gate, cycle=0)
    assert "state T" in played.inject("stop_worker", rank=1).proof
    assert "out of state T" in played.inject("continue_worker", rank=1).proof
    assert f"process {first[0].pid} is gone" in played.inject("kill_worker", rank=0).proof
    runs(played, gate, cycle=1)
    assert played.inject("kill_node", of_rank=1).bound == "n2"
    assert failure(played, "kill_worker", rank=1).startswith("on n2: rank 1 of main-0 on n2 has ended already")
    runs(played, gate, cycle=2)
    played.stage.diagnose(tmp_path / "diagnosis")
    assert "Slurm has sent it" in played.inject("scancel", signal="SIGUSR1").proof
    assert played.end() == 124
    diagnosed = {str(path.relative_to(tmp_path / "diagnosis")) for path in tmp_path.glob("diagnosis/**/*.txt")}
    assert {"slurm/job.txt", "slurm/node.txt", "slurm/squeue.txt", "workers/main-0-rank-1.txt"} <= diagnosed
    told = " ".join(diagnosed)
    assert all(f"processes/{who}" in told for who in ("batch-host-on-n1", "agent-on-n3", "rank-1-on-n3", "store-pid"))


@pytest.mark.parametrize(
    ("stage", "options", "message"),
    [
        ("dev", {"stages": ("local",)}, ":1: on: this flow cannot be had on the stage dev; it can on local"),
        (
            "slurm",
            {"faults": [fault("drain_node", 7, node="n1")]},
            ":7: drain_node: the fault drain_node cannot",
        ),
        (
            "slurm",
            {"disk": 1 << 20},
            ":1: cluster.disk: a small disk cannot be had on the stage slurm; it can on",
        ),
        (
            "dev",
            {"network": "own"},
            ":1: cluster.network: a network of each node's own cannot be had",
        ),
        ("local", {"network": "own", "disk": 1}, "beside networks of their own: no stage can do that"),
        ("slurm", {"settings": {"KillWait": "9"}}, "it can on dev: say `on: [dev]`"),
        ("local", {"faults": [fault("kill_node", 9, batch_host=True)]}, ":9: kill_node.batch_host: a node that the"),
    ],
)
def test_what_a_stage_cannot_do_is_an_error_before_anything_starts(gate, tmp_path, stage, options, message):
    """Each such need is one error that names the line of the flow, and the stages that can meet it."""
    flow = flow_of(gate, tmp_path, **{"settings": {}, **options})
    with pytest.raises(ConfigError) as raised:
        check(flow, stage)
    assert message in str(raised.value)
