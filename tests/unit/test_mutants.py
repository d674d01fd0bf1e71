"""The mutants of `ci.mutants`: each still applies to the product as it is."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from ci.mutants import MUTANTS
from ci.mutants.changes import changed_files
from ci.mutants.checks import by_units
from ci.mutants.control_plane import BEYOND_SIMULATION
from ci.mutants.generated import SUBJECTS, SURVIVORS
from ci.mutants.model import ROOT, Mutant
from ci.mutants.product_copy import ProductCopy
from tests.harness import wait_gone


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies(mutant: Mutant) -> None:
    """The text that each of its edits replaces is in the named file exactly once, and differs from the new text."""
    for edit in mutant.edits:
        assert (ROOT / edit.file).read_text().count(edit.old) == 1, f"{edit.file}: {edit.old!r}"
        assert edit.new != edit.old


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_flows_of_a_mutant_exist(mutant: Mutant) -> None:
    """Each glob fits a shipped flow."""
    names = [path.stem for path in (ROOT / "ci" / "flows").glob("*.yaml")]
    for glob in mutant.flows:
        assert any(fnmatchcase(name, glob) for name in names), glob


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_unit_tests_of_a_mutant_exist(mutant: Mutant) -> None:
    """Each is a file or a folder of this repository."""
    assert mutant.tests
    for test in mutant.tests:
        assert (ROOT / test.partition("::")[0]).exists(), test


def test_each_mutant_has_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_what_the_simulation_does_not_see_are_mutants_of_the_control_plane() -> None:
    """Each such mutant has unit tests, which must detect it."""
    assert {mutant.name for mutant in MUTANTS if mutant.simulated == "job"} >= BEYOND_SIMULATION


def test_each_generated_survivor_is_of_the_product_as_it_is_and_says_why() -> None:
    """Each survivor listed as equivalent is in the source of its subject, has a reason, and is listed once."""
    for subject, listed in tomllib.loads(SURVIVORS.read_text()).items():
        source = " ".join((ROOT / SUBJECTS[subject][0]).read_text().split())
        for each in listed:
            assert " ".join(each["old"].split()) in source, (subject, each["old"])
            assert each["old"] != each["new"] and each["reason"]
        assert len({(each["old"], each["new"]) for each in listed}) == len(listed)


def test_without_an_earlier_commit_no_change_is_known() -> None:
    """As in a clone with one commit: there the mutants of a sample are tried."""
    assert changed_files("no-such-commit") is None


LEAVES_A_PROCESS = """
import os, pathlib, signal, subprocess

def test_it():
    left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    os.kill(left.pid, signal.SIGSTOP)
    pathlib.Path("left").write_text(str(left.pid))
    raise SystemError
"""


def test_processes_that_a_mutant_leaves_are_killed(tmp_path: Path) -> None:
    """The product would end them; a mutant may be that it does not."""
    copy = ProductCopy(tmp_path)
    (tmp_path / "tests" / "test_leaving.py").write_text(LEAVES_A_PROCESS)
    assert by_units(copy, replace(MUTANTS[0], tests=("tests/test_leaving.py",))) == "test_leaving.py::test_it"
    wait_gone([int((tmp_path / "left").read_text())], timeout=0.0)
