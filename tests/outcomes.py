"""Outcomes of suites, filled in by hand, for the tests of the reports."""

from __future__ import annotations

from typing import Any

from nvrx_slurm.lab.flow.outcome import FlowAttempt, FlowFinding, FlowOutcome, InjectedFault, SuiteOutcome

BEGAN_AT = 1_763_739_000.0  # 2025-11-21 15:30 UTC
HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\">]]>&amp;{{7*7}}|`*_\x1b[31mred\x00\ud800\x1b]0;t\x07\x9b\u202e"
)
"""The worst that a name may contain: markup for HTML, XML and Markdown, a colour, a NUL, half a surrogate pair, a
terminal title, a C1 control, a bidi override."""

JOURNAL = (
    "+0.000s      job_started        spare-takes-over (17) on 6 nodes n[0-5]",
    "+0.412s      rendezvous_closed  default/0 cycle 0: n[0-3], world size 4; 4 active, 2 standby",
    "+1.204s      node_lost          n2: connection to its agent closed, at step 5",
    "+1.205s      rendezvous_opened  default/0 cycle 1",
    "+1.231s      rendezvous_closed  default/0 cycle 1: n[0-1,3-4], world size 4, promoted n4; 4 active, 1 standby",
    "+1.846s      recovered          default/0 cycle 1 in 642 ms (detection 1.2 ms, decision 27 ms, restart 614 ms)",
    "+4.021s      job_ended          exit code 0: the workload is done",
)
MISSED = FlowFinding(
    kind="expectation",
    message="expected rendezvous_closed with cycle 1, active 4, standby 1 within 1 s of node_lost: none came",
    file="ci/flows/spare-takes-over.yaml",
    line=14,
    detail=("nearest: +1.231s rendezvous_closed default/0 cycle 1", "  standby: expected 1, was 0"),
)


def injected(at: float) -> InjectedFault:
    """A node killed at this moment."""
    return InjectedFault(
        number=1, what="kill_node of rank 2", t=at, proof="slurmd 4711 is dead", bindings={"$dead": "n2"}
    )


def attempt(number: int = 1, *, after_s: float = 0.0, **changes: Any) -> FlowAttempt:
    """An attempt that passed in 6.3 s, with one fault injected and recovered from. It began `after_s` into the
    run."""
    usual: dict[str, Any] = {
        "verdict": "passed",
        "began_at": BEGAN_AT + after_s,
        "took_s": 6.3,
        "injected": (injected(BEGAN_AT + after_s + 1.2),),
        "recoveries_s": (0.642,),
        "job_id": str(16 + number),
        "exit_code": 0,
        "excerpt": JOURNAL,
    }
    return FlowAttempt(number=number, **{**usual, **changes})


def unwell(number: int = 1, **changes: Any) -> FlowAttempt:
    """An attempt that failed on an expectation."""
    usual: dict[str, Any] = {"verdict": "failed", "findings": (MISSED,), "artifacts": f"nvrx-ci/run/attempt-{number}"}
    return attempt(number, **{**usual, **changes})


def flow(name: str = "spare-takes-over", *attempts: FlowAttempt, **changes: Any) -> FlowOutcome:
    """One flow on a dev cluster, with these attempts."""
    usual: dict[str, Any] = {
        "about": "A killed node's ranks move to a hot spare.",
        "file": f"ci/flows/{name}.yaml",
        "stage": "dev",
        "attempts": attempts,
    }
    return FlowOutcome(name=name, **{**usual, **changes})


def suite(*flows: FlowOutcome, **changes: Any) -> SuiteOutcome:
    """The flows as one run that took 42 s."""
    usual: dict[str, Any] = {"stage": "dev", "began_at": BEGAN_AT, "took_s": 42.0, "exit_code": 0}
    return SuiteOutcome(flows=flows, **{**usual, **changes})


def of_every_kind() -> SuiteOutcome:
    """A flow of each status, and one whose every text is hostile."""
    broken = FlowFinding(kind="error", message="slurmctld does not answer", file="ci/flows/no-slurm.yaml", line=1)
    hostile = FlowFinding(
        kind="fault", message=HOSTILE, file=HOSTILE, line=1, detail=(HOSTILE, "::error::no", "</pre>")
    )
    return suite(
        flow("happy-path", attempt(injected=(), recoveries_s=())),
        flow("spare-takes-over", unwell(1), unwell(2, after_s=8, recoveries_s=())),
        flow("frozen-node", unwell(1), attempt(2, after_s=12, recoveries_s=(3.41, 0.2))),
        flow("no-slurm", attempt(verdict="broken", findings=(broken,), job_id=None, exit_code=None, excerpt=())),
        flow("too-long", attempt(verdict="out_of_time", after_s=30, took_s=12.0)),
        flow("stopped", attempt(verdict="interrupted", after_s=38, took_s=4.0)),
        flow("network-cut", left_out="not for this stage: it can run on local"),
        flow(HOSTILE, unwell(findings=(hostile,), excerpt=(HOSTILE, "::error::no")), about=HOSTILE, file=HOSTILE),
        exit_code=1,
        note="stopped after 42.0 s by SIGINT",
    )
