"""The stop of a node's workers and the wait for GPU memory, with a scripted `nvidia-smi`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nvrx_slurm.agent import stopping
from nvrx_slurm.agent.events import Cycle
from nvrx_slurm.util.clock import SystemClock
from tests.unit.agent.test_joining import RANKS
from tests.unit.core.fleet import plan_of

GIB = 1 << 30


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Put an nvidia-smi on PATH that runs these shell lines."""

    def put(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return put


async def test_memory_of_every_gpu_is_read_in_bytes(smi):
    """nvidia-smi prints MiB, one line per GPU."""
    smi("printf '1024\\n3\\n'")
    assert await stopping.used_bytes() == [GIB, 3 << 20]


@pytest.mark.parametrize("script", ["exit 9", "echo 'No devices were found'", "printf ''; exit 1"])
async def test_smi_that_knows_nothing_is_waited_for_no_longer(smi, script):
    """If nvidia-smi gives no numbers, as on a node without a GPU or with a broken driver, a restart is not
    delayed."""
    smi(script)
    assert await stopping.used_bytes() is None
    assert await stopping.reclaim(GIB, 60.0, SystemClock()) < 30.0


async def test_smi_that_cannot_be_started_costs_the_agent_nothing(smi, tmp_path):
    """An nvidia-smi that cannot be started, as one built for another machine or on a node without free processes,
    counts as no answer."""
    smi("")
    (tmp_path / "nvidia-smi").write_bytes(b"no program")
    assert await stopping.used_bytes() is None


async def test_node_without_smi_waits_for_nothing(tmp_path, monkeypatch):
    """A node without nvidia-smi has no GPU, so nothing is waited for."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await stopping.used_bytes() is None


async def test_wait_ends_when_the_memory_is_free(smi, tmp_path):
    """The wait ends once the memory in use, less at each query, is below the bound."""
    smi(f"n=$(cat {tmp_path}/n 2>/dev/null || echo 4096); echo $n; echo $((n / 2)) > {tmp_path}/n")
    took_s = await stopping.reclaim(2 * GIB, 60.0, SystemClock())
    assert 2 * stopping.ASK_EVERY_S <= took_s < 30.0


async def test_budget_ends_the_wait(smi, caplog):
    """Memory that another process uses does not delay a restart for ever; the log says what is still in use."""
    smi("echo 4096")
    await stopping.reclaim(GIB, 0.1, SystemClock())
    assert "still in use" in caplog.text
    assert "4096" in caplog.text


class Sent:
    """Stands for the workers, the board and the stack dumper, and records what they are asked to do."""

    def __init__(self) -> None:
        self.stops: list[float] = []
        self.dumped: Callable[[], object] | None = None

    def stop(self, grace_s: float, *_: object) -> None:
        self.stops.append(grace_s)

    def begin(self, *_: object, then: Callable[[], object]) -> None:
        self.dumped = then


def test_dump_that_ends_after_its_stop_sends_nothing():
    """A dump that ends after its stop is over sends nothing: the supervisor has died, and another one has the workers
    of the next cycle."""
    sent = Sent()
    stop = stopping.Stopping(plan_of().fault_tolerance, workers=sent, board=sent, dumping=sent, clock=SystemClock())
    stop.stop(Cycle("main-0", 0, RANKS, 0.0, running={0}), lambda: None, dump="rank 0 hangs")
    assert sent.dumped is not None and sent.stops == []
    stop.phase = "stop"
    stop.over()
    sent.dumped()
    assert (sent.stops, stop.phase) == ([], None)
