"""The probe of two nodes, here two real processes with real sockets, locks and files."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from nvrx_slurm.cluster import node_probe
from nvrx_slurm.cluster.node_probe import NodeFacts, Room
from nvrx_slurm.cluster.probe_job import check_nodes, probe_script
from nvrx_slurm.jobspec.plan import plan
from tests.unit.jobspec.specs import job_spec
from tests.waiting import until

WAIT_S = 60.0
KEYS = {"name": "a", "command": "x", "nodes": 2, "setup": ["module load x"]}
SPEC = job_spec({**KEYS, "slurm": {"partition": "gpu"}})
PLAN = plan(SPEC, folder=Path("/jobs"))


def start(folder: Path, node: str) -> subprocess.Popen[bytes]:
    """Start the probe of one of the two nodes."""
    command = [sys.executable, "-P", "-m", "nvrx_slurm.cluster.node_probe", str(folder), "2"]
    return subprocess.Popen(command, env={**os.environ, "SLURMD_NODENAME": node, "NVRX_NODE": ""})


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> list[NodeFacts]:
    folder = tmp_path_factory.mktemp("shared")
    started = [start(folder, node) for node in ("n1", "n2")]
    assert [process.wait(WAIT_S) for process in started] == [0, 0]
    return [msgspec.json.decode((folder / f"{node}.facts").read_bytes(), type=NodeFacts) for node in ("n1", "n2")]


def test_each_node_tries_the_other(facts: list[NodeFacts]) -> None:
    """Each tests TCP, UDP, the clocks, a new file and a lock of the other."""
    for each, other in zip(facts, ("n2", "n1"), strict=True):
        (peer,) = each.peers
        assert (peer.peer, peer.udp, peer.lock_is_seen, peer.error) == (other, True, True, "")
        assert peer.tcp_s is not None and peer.seen_after_s is not None and peer.skew_s is not None
        assert abs(peer.skew_s) < 1.0  # one machine has one clock


def test_a_client_that_sends_no_text_ends_nothing(tmp_path: Path) -> None:
    """A node that gets bytes that are no text answers the next peer; the time to connect does not include the wait
    for UDP."""
    process, here = start(tmp_path, "n1"), tmp_path / "n1.here"
    try:
        until(here.exists, "n1 listens")
        there = msgspec.json.decode(here.read_bytes(), type=node_probe.Here)
        with socket.create_connection((there.address, there.tcp)) as stranger:
            stranger.sendall(b"\xff\xfe\n")
            assert stranger.recv(1) == b""
        with socket.socket(type=socket.SOCK_DGRAM) as silent:
            silent.bind((there.address, 0))
            facts = node_probe._try(tmp_path, "n2", "n1", replace(there, udp=silent.getsockname()[1]))
        assert (facts.error, facts.udp, facts.seen_after_s is not None) == ("", False, True)
        assert facts.tcp_s is not None and facts.tcp_s < node_probe.TRY_S / 3
    finally:
        process.kill()
        process.wait()


def test_what_two_such_nodes_say_is_fit(facts: list[NodeFacts]) -> None:
    """For two such nodes no line fails; a missing node is a failure."""
    assert not [each for each in check_nodes(facts, PLAN, SPEC, nodes=2, problem="") if each.level == "fail"]
    (failed,) = [each for each in check_nodes(facts, PLAN, SPEC, nodes=3, problem="why") if each.level == "fail"]
    assert failed.part == "probe" and "why" in failed.seen


@pytest.mark.parametrize(
    ("node", "peer", "part", "level"),
    [
        ({}, {"tcp_s": None, "error": "timed out"}, "TCP", "fail"),
        ({}, {"udp": False}, "UDP", "warn"),
        ({}, {"skew_s": -7.0}, "clocks", "warn"),
        ({}, {"seen_after_s": None}, "new files", "warn"),
        ({}, {"lock_is_seen": False}, "flock", "warn"),
        ({"flock": False}, {}, "flock", "warn"),
        ({"write_s": 0.5}, {}, "shared folder", "warn"),
        ({"names": ("127.0.1.1",)}, {}, "host names", "warn"),
        ({"python": "3.9.1"}, {}, "Python", "warn"),
        ({"cpus": 1}, {}, "CPUs", "warn"),
        ({"shm": Room(64 << 20, 64 << 20)}, {}, "/dev/shm", "warn"),
        ({"limits": {"nofile": 1024}}, {}, "ulimit nofile", "warn"),
    ],
)
def test_what_a_node_lacks_has_its_line(
    facts: list[NodeFacts], node: dict[str, object], peer: dict[str, object], part: str, level: str
) -> None:
    """The line has the effect, what to change, and who changes it."""
    first, second = facts
    peers = (msgspec.structs.replace(first.peers[0], **peer),)
    first = msgspec.structs.replace(first, **{"peers": peers, **node})
    found = next(each for each in check_nodes([first, second], PLAN, SPEC, nodes=2, problem="") if each.part == part)
    assert found.level == level
    assert found.effect and found.todo and found.by


def test_the_script_asks_for_what_the_job_would_get() -> None:
    """The script has the job's partition and setup lines, two minutes and no requeue, and is one task that waits for
    nothing."""
    extra = {"requeue": True, "hold": True}
    slurm = {"partition": "gpu", "array": "0-7", "dependency": "afterok:1", "time": "2d", "extra": extra}
    spec = job_spec({**KEYS, "spares": "0..2", "output": "%j.log", "slurm": slurm})
    script = probe_script(spec, nodes=2, folder=Path("/jobs"), python="/venv/bin/python")
    lines = script.splitlines()
    assert {"#SBATCH --partition=gpu", "#SBATCH --nodes=2", "#SBATCH --time=0-00:02:00", "#SBATCH --no-requeue"} <= {
        *lines
    }
    not_for_a_probe = tuple(f"#SBATCH --{flag}" for flag in ("array", "dependency", "requeue", "hold"))
    assert not [line for line in lines if line.startswith(not_for_a_probe)]
    assert "#SBATCH --output=/jobs/slurm-%j.out" in lines
    assert "module load x" in lines
