"""What Slurm says of nodes. The text is copied from Slurm 22.05.8 and shortened."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nvrx_slurm.cluster.slurm_nodes import CLOCK_SKEW_S, JobNodes, SlurmNode, node_states, nodes_of
from nvrx_slurm.util.processes import is_alive
from tests.waiting import async_until

HEAD = "NodeName=n2 Arch=x86_64 CPUTot=4 NodeAddr=127.0.0.1 OS=Linux 6.18 #1 SMP PREEMPT_DYNAMIC @0  Gres=(null)"
UP = f"{HEAD} State=IDLE ThreadsPerCore=1 Partitions=main  BootTime=2026-11-21T08:55:39 SlurmdStartTime=None"
DOWN = UP.replace("IDLE", "DOWN+NOT_RESPONDING") + " ExtSensorsTemp=n/s Reason={} [root@2026-11-21T12:26:48]"
BOOTED_AT, ADDR = 1795251339.0, "127.0.0.1"


def test_a_node_that_is_well_has_a_state_and_no_reason() -> None:
    """Times are UTC, as scontrol was asked to print them."""
    assert list(nodes_of(UP + "\n")) == [SlurmNode("n2", "IDLE", None, BOOTED_AT, ADDR)]


@pytest.mark.parametrize("reason", ["Not responding", "two = words [x]", "State=IDLE or so", "mail me@home"])
def test_a_reason_is_any_text(reason: str) -> None:
    """It may contain blanks, brackets and `=`; its author and its time are cut off."""
    assert list(nodes_of(DOWN.format(reason))) == [SlurmNode("n2", "DOWN+NOT_RESPONDING", reason, BOOTED_AT, ADDR)]


def test_slurmd_listens_where_slurm_says() -> None:
    """The port is the node's own, or the one of all nodes, which Slurm does not show here."""
    (own,) = nodes_of(UP.replace("OS=", "Port=30092 OS="))
    (common,) = nodes_of(UP)
    assert (own.addr, own.port, common.port) == (ADDR, 30092, None)


@pytest.mark.parametrize("state", ["DOWN", "IDLE*", "MIXED+DRAIN", "DOWN*+DRAIN", "ALLOCATED+NOT_RESPONDING", "IDLE"])
def test_a_node_that_was_taken_out_of_use_takes_no_steps(state: str) -> None:
    """A health check, an administrator, or slurmctld itself may have done that."""
    (node,) = nodes_of(UP.replace("IDLE", state))
    assert node.takes_steps is (state in ("IDLE", "IDLE*"))


def test_a_reason_ends_where_a_newer_slurm_goes_on() -> None:
    """From 22.05 on a comment may follow the reason."""
    (node,) = nodes_of(DOWN.format("broken") + " Comment=Reason=none")
    assert node.reason == "broken"


@pytest.mark.parametrize("time", ["None", "Unknown", "N/A", ""])
def test_a_node_that_never_registered_has_no_boot_time(time: str) -> None:
    """Such a node proves nothing, in any state."""
    (node,) = nodes_of(UP.replace("2026-11-21T08:55:39", time))
    assert node.booted_at is None
    assert not node.proves_dead(heard_at=0.0)


def test_other_lines_are_no_nodes() -> None:
    """The output of a site's plugins, or an error, names no node."""
    assert list(nodes_of("Node nope not found\n\nslurm_load_node error: State=DOWN\n")) == []


@pytest.mark.parametrize("state", ["DOWN", "DOWN+NOT_RESPONDING", "IDLE+CLOUD+POWERED_DOWN", "FAIL", "IDLE*+DRAIN"])
def test_no_state_proves_a_death(state: str) -> None:
    """The state of a node says what slurmctld could reach, not what runs on the node."""
    assert not SlurmNode("n2", state, None, BOOTED_AT).proves_dead(heard_at=BOOTED_AT + 1.0)


def test_a_reboot_after_the_last_sign_of_life_proves_it() -> None:
    """The boot must be later by more than clocks can differ; an earlier boot, or one that may look later because of
    skewed clocks, proves nothing."""
    node = SlurmNode("n2", "IDLE", None, BOOTED_AT)
    assert node.proves_dead(heard_at=BOOTED_AT - CLOCK_SKEW_S - 1.0)
    assert not node.proves_dead(heard_at=BOOTED_AT - CLOCK_SKEW_S)
    assert not node.proves_dead(heard_at=BOOTED_AT + 1.0)


async def test_a_list_of_nodes_that_cannot_be_unfolded_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not mean that the job has no node."""
    for name, script in (("squeue", "echo 'n[1-2]'"), ("scontrol", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    (tmp_path / "slurm.conf").touch()
    assert await JobNodes("7").allocated() is None


# ---- missing answers


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site's script in place of scontrol, whose child hangs and keeps the pipe open; the file gets the child's
    pid."""
    path = tmp_path / "scontrol"
    path.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/new\nmv {tmp_path}/new {tmp_path}/pid\nwait\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    return tmp_path / "pid"


async def test_a_question_that_is_cancelled_leaves_no_process(hanging: Path) -> None:
    """A controller that ends kills the scontrol that it has started, and the processes that this has started."""
    asked = asyncio.create_task(node_states(["n2"], timeout_s=1000.0))
    await async_until(hanging.exists, "scontrol to hang")
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await async_until(lambda: not is_alive(int(hanging.read_text())), "its child to be dead")


async def test_a_scontrol_that_hangs_is_no_answer(hanging: Path) -> None:
    """The query ends at its bound."""
    assert await node_states(["n2"], timeout_s=0.05) == {}


async def test_no_slurm_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scontrol, with a SLURM_CONF that names no file, and for no nodes, nothing is known."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await node_states([]) == {}
    assert await node_states(["n2"]) == {}
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "nowhere"))
    assert await node_states(["n2"]) == {}
