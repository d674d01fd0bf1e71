"""The JUnit report: one test suite a flow, one test case in it, its attempts in the manner of Maven Surefire.

Surefire's documentation of `rerunFailingTestsCount` defines how repeated attempts look: a test that failed throughout
has its first run as `failure` and the others as `rerunFailure`; one that passed at last has the runs that did not as
`flakyFailure`, and counts as passed. What stops a flow from running (no Slurm, out of time) is an error in the same
places. Properties stand at the suite, the only place where the common schema (Jenkins' junit-10) has them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from junitparser import Error, Failure, Skipped
from junitparser.xunit2 import (
    FlakyError,
    FlakyFailure,
    InterimResult,
    JUnitXml,
    RerunError,
    RerunFailure,
    TestCase,
    TestSuite,
)

from nvrx_slurm.lab.flow.outcome import FlowAttempt, FlowOutcome, SuiteOutcome
from nvrx_slurm.lab.flow.report_text import STYLES, block, facts, not_passed, path_from, place, plain


def document(outcome: SuiteOutcome, hostname: str, base: Path | None = None) -> str:
    """The whole XML file, as text. `hostname`: of the machine that ran the suite; paths are relative to `base`."""
    xml = JUnitXml(f"nvrx-slurm ci on {plain(outcome.stage)}")
    for flow in outcome.flows:
        suite = TestSuite(plain(flow.name))
        suite.file = plain(path_from(base, flow.file))
        suite.hostname = plain(hostname)
        began_at = flow.attempts[0].began_at if flow.attempts else outcome.began_at
        suite.timestamp = datetime.fromtimestamp(began_at, UTC).isoformat(timespec="seconds")
        properties: dict[str, object] = {
            "stage": flow.stage,
            "status": flow.status,
            "attempts": len(flow.attempts),
        }
        for attempt in flow.attempts:
            known = {
                "verdict": attempt.verdict,
                "seconds": f"{attempt.took_s:.3f}",
                "job_id": attempt.job_id,
                "exit_code": attempt.exit_code,
                "recoveries_s": " ".join(f"{time:.3f}" for time in attempt.recoveries_s) or None,
                "artifacts": attempt.artifacts,
            }
            properties |= {f"attempt.{attempt.number}.{name}": value for name, value in known.items()}
        for name, value in properties.items():
            if value is not None:
                suite.add_property(name, plain(str(value)))
        suite.add_testcase(_case(flow, base))
        xml.add_testsuite(suite)
    xml.update_statistics()
    return str(xml.tostring().decode())


def _case(flow: FlowOutcome, base: Path | None) -> TestCase:
    case = TestCase(plain(flow.name), f"flows.{flow.stage}", round(flow.took_s, 3))
    unwell = not_passed(flow)
    if flow.status == "left_out":
        case.result = [Skipped(plain(flow.left_out or ""))]
    elif flow.status == "flaky":
        for attempt in unwell:
            case.add_interim_result(_interim(FlakyFailure, FlakyError, attempt, _story(flow, attempt, base)))
    elif unwell:
        first = unwell[0]
        result = (Failure if first.verdict == "failed" else Error)(*_message_and_kind(first))
        result.text = _story(flow, first, base)
        case.result = [result]
        for attempt in unwell[1:]:
            case.add_interim_result(_interim(RerunFailure, RerunError, attempt, _story(flow, attempt, base)))
    if flow.attempts:  # a failure is the first run's, so the journal beside it is too
        case.system_out = block(unwell[0].excerpt if unwell and flow.status != "flaky" else flow.attempts[-1].excerpt)
    return case


def _interim(
    failure: type[InterimResult], error: type[InterimResult], attempt: FlowAttempt, story: str
) -> InterimResult:
    result = (failure if attempt.verdict == "failed" else error)(*_message_and_kind(attempt))
    result.stack_trace = story  # the schema wants it before system-out
    result.system_out = block(attempt.excerpt)
    return result


def _message_and_kind(attempt: FlowAttempt) -> tuple[str, str]:
    if not attempt.findings:
        return STYLES[attempt.verdict].word, attempt.verdict
    return plain(attempt.findings[0].message), attempt.findings[0].kind


def _story(flow: FlowOutcome, attempt: FlowAttempt, base: Path | None) -> str:
    lines = [facts(flow, attempt)]
    for finding in attempt.findings:
        lines += [f"{place(finding, base)}: {finding.message}", *(f"    {line}" for line in finding.detail)]
    lines += [f"artifacts: {path_from(base, attempt.artifacts)}"] if attempt.artifacts else []
    return block(lines)
