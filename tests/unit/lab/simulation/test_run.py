"""Whole runs: the same each time, they end, and keep the promises."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nvrx_slurm.journal.records import (
    JobEnded,
    NodeLost,
    RecordsRefused,
    RendezvousClosed,
    RestartDecided,
    Shutdown,
    Tick,
)
from nvrx_slurm.lab.simulation.adversary import Act
from nvrx_slurm.lab.simulation.run import run_seed
from nvrx_slurm.lab.simulation.scenario import draw_scenario
from nvrx_slurm.lab.simulation.shapes import draw_shape

NODES = 8
PLAIN = "import sys; from nvrx_slurm.lab.simulation.run import run_seed; print(run_seed(int(sys.argv[1]), 8).digest)"


def records(result, kind):
    return [entry.record for entry in result.journal if isinstance(entry.record, kind)]


def seed_where(wanted) -> int:
    """The first seed whose job meets the condition."""
    return next(seed for seed in range(1_000) if wanted(draw_scenario(seed, NODES).shape))


def simple(shape) -> bool:
    [role, *others] = shape.plan.roles
    plain = role.on_failure == "restart_replica" and not others and role.replicas == 1
    return plain and shape.plan.spares > 0 and not shape.plan.fault_tolerance.attribution.acts


@pytest.fixture(scope="module")
def seed():
    """A seed of a plain job with a spare, on Slurm, that may be restarted, and that gives a silent node up before its
    peers count as hung."""
    return seed_where(
        lambda shape: (
            simple(shape)
            and shape.cluster == "slurm"
            and shape.plan.fault_tolerance.max_restarts.count
            and shape.plan.fault_tolerance.hang.step_timeout is None
        )
    )


@pytest.mark.parametrize("seed", range(20))
def test_job_without_acts_finishes(seed):
    """Without an act a job of any shape ends with 0, in one cycle."""
    result = run_seed(seed, NODES, ())
    assert (result.broken, result.exit_code) == (None, 0)
    assert all(closed.cycle == 0 for closed in records(result, RendezvousClosed))


@pytest.mark.parametrize("seed", [20_000_665, 20_021_167, 20_021_457, 40_010_403])
def test_runs_that_were_false_alarms(seed):
    """A killed agent whose join is read late, while job and node are frozen; supervisors that die again and again; an
    agent that kept running while the job was suspended."""
    assert run_seed(seed).broken is None


@pytest.mark.parametrize("seed", [20_008_534, 20_015_004, 20_022_760])
def test_runs_that_found_defects(seed):
    """An agent that joins again before its first join is carried out, or that leaves before its next join is."""
    assert run_seed(seed).broken is None


def test_job_that_ends_before_its_store_answers_has_no_journal(seed):
    """It is cancelled meanwhile, and its journal is empty."""
    acts = (Act(at_s=0.0, kind="restart_store", lasts_s=100.0), Act(at_s=1.0, kind="scancel"))
    result = run_seed(seed, NODES, acts)
    assert (result.broken, result.exit_code, result.journal) == (None, 143, ())


@pytest.mark.parametrize("seed", range(40))
def test_promises_are_kept_under_any_acts_of_the_adversary(seed):
    """Each run ends without a broken promise."""
    assert run_seed(seed, NODES).broken is None


def test_same_seed_gives_the_same_in_every_process():
    """The journal is the same byte for byte, in any order of a set of strings."""
    digests = set()
    for hash_seed in ("1", "2"):
        result = subprocess.run(
            [sys.executable, "-c", PLAIN, "2"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(result.stdout)
    assert digests == {run_seed(2, NODES).digest + "\n"}


@pytest.fixture(scope="module")
def results():
    return [run_seed(seed, NODES) for seed in range(10)]


def test_other_seeds_give_other_runs(results):
    """Each digest identifies one run."""
    assert len({result.digest for result in results}) == 10


def test_drawn_acts_happen_before_the_job_ends(results):
    """Most acts do: one that comes too late tests nothing."""
    assert sum(result.happened for result in results) >= 0.85 * sum(len(result.acts) for result in results)


def test_dead_node_is_replaced_by_a_spare(seed):
    """A node without power is given up, and a spare runs its ranks."""
    victim = draw_scenario(seed, NODES).shape.nodes[0]
    result = run_seed(seed, NODES, (Act(at_s=1.0, kind="power_off", node=victim),))
    assert (result.broken, result.exit_code) == (None, 0)
    assert [lost.node for lost in records(result, NodeLost)] == [victim]
    assert (
        records(result, RendezvousClosed)[-1].promoted and victim not in records(result, RendezvousClosed)[-1].nodes
    )


def test_failed_worker_costs_a_restart(seed):
    """The journal has the failed worker with its rank."""
    result = run_seed(
        seed, NODES, (Act(at_s=1.0, kind="fail_worker", node=draw_scenario(seed, NODES).shape.nodes[0]),)
    )
    assert [decided.rank for decided in records(result, RestartDecided)] == [0]


@pytest.mark.parametrize("moment", range(3))
def test_controller_dies_at_a_commit(seed, moment):
    """Before or after the store takes the commit, or while it is on its way: the next controller goes on."""
    result = run_seed(seed, NODES, (Act(at_s=0.6, kind="kill_at_commit", number=moment),))
    assert (result.broken, result.exit_code) == (None, 0)


def test_record_without_the_jobs_key_is_no_fact_that_waits(seed):
    """The controller refuses it, so a deadline that passes later is not judged ahead of a fact."""
    missing = [Act(at_s=0.0, kind="never_start", node=node) for node in draw_scenario(seed, NODES).shape.nodes[:2]]
    result = run_seed(seed, NODES, (*missing, Act(at_s=5.0, kind="forge_record")))
    assert result.broken is None
    assert records(result, RecordsRefused)
    assert records(result, Tick)


def test_cancelled_job_ends_with_its_code(seed):
    """After scancel the controller orders a shutdown, and the job ends with 143."""
    result = run_seed(seed, NODES, (Act(at_s=1.0, kind="scancel"),))
    assert (result.broken, result.exit_code) == (None, 143)
    assert [shutdown.reason for shutdown in records(result, Shutdown)] == ["cancelled"]
    assert records(result, JobEnded)


def test_shapes_are_valid_configurations():
    """Every drawn job has nodes and time limits that job.yaml allows."""
    from random import Random

    for seed in range(300):
        plan = draw_shape(Random(seed), 16).plan
        bounds = plan.fault_tolerance
        assert plan.total_nodes <= 16
        assert bounds.heartbeat.interval < bounds.heartbeat.timeout <= bounds.heartbeat.startup_timeout
        assert bounds.heartbeat.timeout <= bounds.fence_timeout <= bounds.control_plane_grace
