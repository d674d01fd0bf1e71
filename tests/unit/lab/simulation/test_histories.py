"""Histories of the libraries are the same byte for byte, keep all promises, and are shrunk to the fewest faults if
one is broken."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from nvrx_slurm.lab.simulation.histories import RUNNERS, fewest_acts, replay_history, run_histories
from nvrx_slurm.lab.simulation.threads import HistoryResult
from nvrx_slurm.lab.simulation.transport.history import PayloadHistory
from nvrx_slurm.lab.simulation.transport.shape import PayloadAct, PayloadFault

SEEDS = 40
DIGESTS = """
import sys
from nvrx_slurm.lab.simulation.histories import RUNNERS
print(*(RUNNERS[sys.argv[1]](seed, None).digest for seed in range(3)))
"""


@pytest.mark.parametrize("of", RUNNERS)
def test_histories_keep_their_promises(of: str) -> None:
    """Most of the histories have faults."""
    results = [RUNNERS[of](seed, None) for seed in range(SEEDS)]
    assert [result.broken for result in results if result.broken] == []
    assert sum(bool(result.acts) for result in results) > SEEDS / 2


# Each was reported as broken because of a defect of the simulation: views for longer than leases, one after the
# other; a connection that takes longer than the deadline; two stops of a reader at a time.
FALSE_ALARMS = [("transport", seed) for seed in (20_000_118, 20_003_447, 20_013_258)]


@pytest.mark.parametrize(("of", "seed"), FALSE_ALARMS)
def test_histories_that_were_false_alarms(of: str, seed: int) -> None:
    """These histories keep their promises."""
    assert RUNNERS[of](seed, None).broken is None


def test_a_history_is_collected_with_the_clients_that_it_never_closed() -> None:
    """Otherwise each run would take longer than the one before, since the collector would visit all earlier
    histories."""
    history = PayloadHistory(0, (PayloadAct(0.02, PayloadFault.KILL_READER, 0),))
    history.run()
    left = weakref.ref(history)
    del history
    gc.collect()
    assert left() is None


def test_a_killed_reader_leaves_its_stop_to_no_later_one() -> None:
    """Otherwise a read of the next process could end late without being reported."""
    acts = PayloadAct(0.01, PayloadFault.STOP_READER, 0, 1.0), PayloadAct(0.02, PayloadFault.KILL_READER, 0)
    history = PayloadHistory(0, acts)
    assert history.run().broken is None
    assert history.readers[0].life == 2
    assert history.readers[0].process.frozen_s == 0


@pytest.mark.parametrize("of", RUNNERS)
def test_a_seed_is_the_same_history_in_any_process(of: str) -> None:
    """It depends neither on the hash seed of the process nor on earlier runs."""
    here = [RUNNERS[of](seed, None).digest for seed in range(3)]
    env = {**os.environ, "PYTHONHASHSEED": "4711"}
    done = subprocess.run([sys.executable, "-c", DIGESTS, of], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == here


@pytest.fixture
def thresholds() -> Iterator[tuple[int, ...]]:
    """Those of the cycle collector, which the test sets."""
    before = gc.get_threshold()
    yield (100, 300, 700, 2000)
    gc.set_threshold(*before)


def test_a_seed_is_the_same_history_whenever_cycles_are_collected(thresholds: tuple[int, ...]) -> None:
    """In this one a reader is killed: what the collector finalises of its client acted in the middle of a history."""
    digests = set()
    for threshold in thresholds:
        gc.set_threshold(threshold)
        digests.add(RUNNERS["transport"](90, None).digest)
    assert len(digests) == 1


def test_the_fewest_acts_that_break_the_same_promise() -> None:
    """Acts that are not needed to break the promise are removed."""

    def runner(seed: int, acts: tuple[int, ...] | None) -> HistoryResult:
        acts = (1, 2, 3, 4, 5) if acts is None else acts
        promise = "both" if {2, 5} <= set(acts) else None
        return HistoryResult(seed, "numbers", acts, (), promise, promise and "broken", "")

    assert fewest_acts(runner, runner(0, None)).acts == (2, 5)


def test_a_run_of_seeds_says_how_many_kept_their_promises() -> None:
    """The exit code is 0."""
    said: list[str] = []
    assert run_histories("transport", range(3), 1, said.append) == 0
    assert "3 runs of transport" in said[-1] and "all promises kept" in said[-1]


def test_one_seed_again_prints_what_happened() -> None:
    """It prints the shape, the faults, the lines, and the digest for comparing two runs."""
    said: list[str] = []
    assert replay_history("inprocess", 3, said.append) == 0
    assert f"digest {RUNNERS['inprocess'](3, None).digest}" in said
