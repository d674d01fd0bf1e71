"""Without Vectorscan Python searches for the rules, and finds the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.attribution.rules.catalogue import Catalogue, load_catalogue
from nvrx_slurm.attribution.scan import vectorscan
from nvrx_slurm.attribution.scan.prefilter import Prefilter, Searcher, SearchFactory, search_in_python
from nvrx_slurm.errors import ConfigError
from tests.unit.attribution.scan.logs import rule

# Judges every fourth case of the corpus and prints what it says of each.
_JUDGE = """
import asyncio, json, sys
if sys.argv[1] == "without":
    sys.modules["hyperscan"] = None  # importing it raises ModuleNotFoundError
from pathlib import Path
from ci.cases import PARTS, read_part
from ci.corpus import judge
from msgspec.structs import replace
from nvrx_slurm.util.log import set_up
set_up("attribution")
cases = [case for part in PARTS for case in read_part(part)[::4]]
answers = asyncio.run(judge(cases, Path(sys.argv[2])))
print(json.dumps([[each.case.name, repr(replace(each.answer, latency_s=0))] for each in answers]))
"""


def judged(how: str, root: Path) -> tuple[list[list[str]], str]:
    environment = {**os.environ, "PYTHONHASHSEED": "0"}  # consequences of the same time are named in a set's order
    done = subprocess.run(
        [sys.executable, "-c", _JUDGE, how, str(root)], capture_output=True, text=True, check=True, env=environment
    )
    return json.loads(done.stdout), done.stderr


def test_the_corpus_is_judged_the_same_without_vectorscan(tmp_path: Path) -> None:
    """Verdict, evidence and blame of each case are the same; one line of the log names the engine."""
    expected, said = judged("with", tmp_path)
    assert said.count("rules are searched for by Vectorscan") == 1
    answers, said = judged("without", tmp_path)
    assert said.count("rules are searched for by Python, slowly") == 1
    assert len(answers) > 100
    assert dict(answers) == dict(expected)


def test_samples_of_shipped_rules() -> None:
    """Each rule is among those that may match its own samples."""
    prefilter = Prefilter(load_catalogue(), search=search_in_python)
    searcher = Searcher(prefilter)
    for number, each in enumerate(prefilter.rules):
        for sample in (sample.encode() for sample in each.sample):
            assert number in searcher.present(sample), each.name
            assert searcher.may_match(number, sample), each.name


@pytest.mark.parametrize("search", [vectorscan.search, search_in_python], ids=["Vectorscan", "Python"])
def test_a_rule_without_literals_is_refused(search: SearchFactory) -> None:
    """No search engine could find such a rule."""
    with pytest.raises(ConfigError) as caught:
        _ = Prefilter(Catalogue((rule("any", "x"),)), search=search).literals
    assert caught.value.key == "any"


def test_case_is_ignored_for_the_rules_that_say_so() -> None:
    """Of two rules with the same literal, one ignores case and the other does not."""
    rules = rule("any case", "(?i)fatal", "fatal", ignore_case=True), rule("exact", "fatal", "fatal")
    searcher = Searcher(Prefilter(Catalogue(rules), search=search_in_python))
    assert searcher.present(b"FATAL") == [0]
    assert searcher.present(b"fatal") == [0, 1]
