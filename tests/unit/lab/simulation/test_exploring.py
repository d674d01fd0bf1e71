"""The corpus of scenarios is replayed, and a scenario that reaches something new is added."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.lab.simulation.exploring import HAS_MONITORING, Corpus, Coverage, explore, pairs
from nvrx_slurm.lab.simulation.run import run_scenario
from nvrx_slurm.lab.simulation.scenario import draw_scenario, scenario_from_json, scenario_to_json
from nvrx_slurm.lab.simulation.seeds import replay_file

SEEDS = Path(__file__).resolve().parents[3] / "seeds"
FILES = sorted(SEEDS.glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_corpus_breaks_no_promise(file):
    """Each scenario that once reached something new, or broke a promise, is run again."""
    scenario = scenario_from_json(file.read_text())
    assert scenario.about
    assert run_scenario(scenario).broken is None


def test_corpus_is_there():
    assert len(FILES) >= 20


def test_corpus_keeps_what_is_new(tmp_path):
    """A scenario is written once, with what it was the first to reach, and the next run reads it."""
    one, other = draw_scenario(1, 4), draw_scenario(2, 4)
    corpus = Corpus([], tmp_path / "kept")
    corpus.take(one, ["core/job.py:1", "core/job.py:2"])
    corpus.take(other, ["core/job.py:2"])
    [file] = (tmp_path / "kept").iterdir()
    assert scenario_from_json(file.read_text()).about == "the first to reach core/job.py:1 and 1 more"
    assert len(Corpus([tmp_path / "kept"], None).scenarios) == corpus.added == 1


def test_pairs_of_events_are_places():
    result = run_scenario(draw_scenario(1, 4))
    assert "job_started → rendezvous_opened" in pairs(result.journal)


def test_exploring_ends_when_its_time_is_up(tmp_path):
    """Two processes run the corpus first, then some runs; one line reports them, and no promise is broken."""
    (tmp_path / "one.json").write_text(scenario_to_json(draw_scenario(3, 4)))
    said: list[str] = []
    assert explore(0.01, 0, 4, 2, [tmp_path], tmp_path / "kept", said.append) == 0
    assert any(" runs in " in line and line.endswith("0 broken") for line in said)


def test_scenario_of_a_broken_promise_is_no_corpus(tmp_path):
    """`--scenario` replays its file, and exploring does not start from it."""
    file = Corpus([], tmp_path).write(draw_scenario(3, 4), "broken-")
    assert file is not None
    said: list[str] = []
    assert replay_file(file, said.append) == 0
    assert Corpus([tmp_path], None).scenarios == []


@pytest.mark.skipif(not HAS_MONITORING, reason="sys.monitoring is new in Python 3.12")
def test_coverage_names_lines_and_branches():
    """What a run has reached is reported once."""
    measured = Coverage()
    try:
        run_scenario(draw_scenario(3, 4))
        places = measured.take_new()
        assert {place for place in places if " " not in place} <= measured.lines
        assert any(place.startswith("core/rendezvous.py:") and ">" in place for place in places)
        run_scenario(draw_scenario(3, 4))
        assert measured.take_new() == []
    finally:
        measured.close()
