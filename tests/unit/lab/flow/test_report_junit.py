"""The JUnit report."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
import xmlschema

from nvrx_slurm.lab.flow import report_junit
from nvrx_slurm.lab.flow.outcome import FlowOutcome
from tests.outcomes import JOURNAL, attempt, flow, of_every_kind, suite, unwell


@cache
def schema() -> xmlschema.XMLSchema:
    return xmlschema.XMLSchema(Path(__file__).with_name("junit.xsd"))


def parsed(*flows: FlowOutcome) -> ElementTree.Element:
    text = report_junit.document(suite(*flows), "runner-1")
    schema().validate(text)
    return ElementTree.fromstring(text)


def case(flow: FlowOutcome) -> ElementTree.Element:
    found = parsed(flow).find("testsuite/testcase")
    assert found is not None
    return found


def test_every_kind_of_outcome_is_valid() -> None:
    """For every outcome of a suite, with hostile names and control characters, the report fits the schema."""
    text = report_junit.document(of_every_kind(), "runner-1")
    schema().validate(text)
    root = ElementTree.fromstring(text)
    assert {name: root.get(name) for name in ("tests", "failures", "errors")} == {
        "tests": "8",
        "failures": "2",
        "errors": "3",
    }


def test_the_schema_refuses_what_readers_do_not_know() -> None:
    """A report can fail the schema: it does not allow properties of a test case."""
    text = report_junit.document(suite(flow("happy-path", attempt())), "runner-1")
    with pytest.raises(xmlschema.XMLSchemaValidationError, match="properties"):
        schema().validate(text.replace("<system-out>", "<properties /><system-out>", 1))


def test_a_flow_is_a_suite_with_one_case() -> None:
    """Each flow file is a suite with its file, time and machine, and its job's properties."""
    root = parsed(flow("happy-path", attempt(recoveries_s=(0.6421, 1.0))), flow("crash-loop", attempt()))
    happy, crash = root.findall("testsuite")
    assert (happy.get("name"), crash.get("name")) == ("happy-path", "crash-loop")
    assert happy.get("file") == "ci/flows/happy-path.yaml"
    assert happy.get("hostname") == "runner-1"
    assert happy.get("timestamp") == "2025-11-21T15:30:00+00:00"
    assert {each.get("name"): each.get("value") for each in happy.iter("property")} == {
        "stage": "dev",
        "status": "passed",
        "attempts": "1",
        "attempt.1.verdict": "passed",
        "attempt.1.seconds": "6.300",
        "attempt.1.job_id": "17",
        "attempt.1.exit_code": "0",
        "attempt.1.recoveries_s": "0.642 1.000",
    }
    assert [each.get("name") for each in happy.iter("testcase")] == ["happy-path"]


def test_a_pass_holds_its_journal() -> None:
    """A flow that passed has only the excerpt of the journal, and its time."""
    passed = case(flow("happy-path", attempt()))
    assert [child.tag for child in passed] == ["system-out"]
    assert passed.findtext("system-out") == "\n".join(JOURNAL)
    assert passed.get("time") == "6.3"


def test_a_pass_after_a_failure_is_flaky() -> None:
    """As in Surefire's format, a retry that passed is a pass with the failed run as its child."""
    flaky = case(flow("frozen-node", unwell(1), attempt(2)))
    assert [child.tag for child in flaky] == ["flakyFailure", "system-out"]
    failed = flaky.find("flakyFailure")
    assert failed is not None
    assert failed.get("type") == "expectation"
    assert "none came" in str(failed.get("message"))
    assert "ci/flows/spare-takes-over.yaml:14: expected rendezvous_closed" in str(failed.findtext("stackTrace"))
    assert failed.findtext("system-out") == "\n".join(JOURNAL)


def test_a_failure_has_its_other_runs_beside_it() -> None:
    """Every attempt of a flow that never passed is in the report: the first as the failure, the others as re-runs."""
    stopped = attempt(3, verdict="interrupted")
    failed = case(flow("spare-takes-over", unwell(1), unwell(2), stopped))
    assert [child.tag for child in failed] == ["failure", "rerunFailure", "rerunError", "system-out"]
    text = str(failed.findtext("failure"))
    assert "attempt 1 of 3, job 17, exit code 0" in text
    assert "    nearest: +1.231s rendezvous_closed" in text
    assert "artifacts: nvrx-ci/run/attempt-1" in text


@pytest.mark.parametrize("verdict", ["broken", "out_of_time", "interrupted"])
def test_what_did_not_fail_by_itself_is_an_error(verdict: str) -> None:
    """A flow that could not be run, or not to its end, is no failure of the product."""
    error = case(flow("no-slurm", attempt(verdict=verdict))).find("error")
    assert error is not None
    assert error.get("type") == verdict


def test_a_flow_that_was_left_out_is_skipped() -> None:
    """The report has the reason."""
    skipped = case(flow("network-cut", left_out="not for this stage")).find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "not for this stage"


def test_paths_are_relative_to_a_folder() -> None:
    """A reader of the report with the checkout finds the file."""
    below = flow("happy-path", attempt(), file="/checkout/ci/flows/happy-path.yaml")
    root = ElementTree.fromstring(report_junit.document(suite(below), "runner-1", Path("/checkout")))
    assert root.find("testsuite").get("file") == "ci/flows/happy-path.yaml"  # type: ignore[union-attr]
