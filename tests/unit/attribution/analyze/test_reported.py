"""The exception that a worker reported to its agent."""

from __future__ import annotations

import pytest

from nvrx_slurm.attribution.analyze.analysis import NO_FILE, with_reported
from nvrx_slurm.attribution.analyze.attributing import attribute
from nvrx_slurm.attribution.rules.catalogue import load_catalogue
from nvrx_slurm.attribution.scan.blocks import excerpt
from nvrx_slurm.attribution.scan.model import LONGEST_TEXT
from nvrx_slurm.journal.verdicts import Verdict
from tests.unit.attribution.analyze.evidence import failed, hit, inquiry, rule, scan

NO_MODULE = "ModuleNotFoundError: No module named 'flash_attn'"


def test_it_is_evidence_before_any_output_is_written() -> None:
    """The agent receives the exception before the output is written."""
    asked = inquiry(failed(3, exit_code=1, error=NO_MODULE, t=50.0))
    answer = attribute(asked, with_reported(scan(), asked, load_catalogue()))
    assert (answer.verdict, answer.fault, answer.ranks) == (Verdict.STOP, "import_error", (3,))
    assert answer.primary is not None
    assert (answer.primary.file, answer.primary.text, answer.primary.node) == (str(NO_FILE), NO_MODULE, "n1")


@pytest.mark.parametrize("text", [NO_MODULE, f"[rank3]: {NO_MODULE}"])
def test_it_does_not_count_twice(text: str) -> None:
    """Once the output contains the exception, only that line counts."""
    written = scan(hit(rule("import_error.module"), 3, text=text))
    asked = inquiry(failed(3, error=NO_MODULE))
    assert with_reported(written, asked, load_catalogue()) == written


def test_of_a_long_one_the_beginning_counts() -> None:
    """Of a long exception only the beginning counts, as of a line of a log, and it does not count twice either."""
    long = f"{NO_MODULE} {'é' * 900_000}"
    asked = inquiry(failed(3, exit_code=1, error=long, t=50.0))
    found = with_reported(scan(), asked, load_catalogue()).hits
    assert {hit.rule.fault for hit in found} >= {"import_error"}
    assert all(len(hit.text) <= LONGEST_TEXT for hit in found)
    hidden = inquiry(failed(3, exit_code=1, error=f"{'x' * 900_000} {NO_MODULE}"))
    assert with_reported(scan(), hidden, load_catalogue()) == scan()
    written = scan(hit(rule("import_error.module"), 3, text=excerpt(f"[rank3]: {long}".encode())))
    assert with_reported(written, asked, load_catalogue()) == written


def test_no_reported_exception_adds_nothing() -> None:
    """A worker that was killed reports no exception."""
    assert with_reported(scan(), inquiry(failed(3, signal=9)), load_catalogue()) == scan()
