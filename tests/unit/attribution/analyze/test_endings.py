"""Exit codes and signals by themselves."""

from __future__ import annotations

import pytest

from nvrx_slurm.attribution.analyze.verdict import contradicts, ending, signal_of
from nvrx_slurm.journal.verdicts import Failed, Scope, Verdict
from tests.unit.attribution.analyze.evidence import failed

ENDINGS = [
    (None, "unknown", Verdict.UNKNOWN),
    (failed(signal=9), "killed", Verdict.UNKNOWN),
    (failed(exit_code=137), "killed", Verdict.UNKNOWN),
    (failed(signal=11), "segfault", Verdict.UNKNOWN),
    (failed(exit_code=139), "segfault", Verdict.UNKNOWN),
    (failed(signal=15), "terminated", Verdict.UNKNOWN),
    (failed(exit_code=1), "unknown", Verdict.UNKNOWN),
    (failed(hung=True, cause="no progress for 600 s"), "hang", Verdict.UNKNOWN),
    (failed(None, cause="connection to its agent closed"), "node_lost", Verdict.RESTART),
]


@pytest.mark.parametrize(("how", "fault", "verdict"), ENDINGS)
def test_ending(how: Failed | None, fault: str, verdict: Verdict) -> None:
    """No exit code or signal is by itself a reason to stop."""
    end = ending(how)
    assert (end.fault, end.verdict) == (fault, verdict)
    assert end.confidence < 0.5 or end.scope is Scope.NODE


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        ("No such file or directory: /no/prog", Verdict.STOP),
        ("No such program (looked on PATH): pyton", Verdict.STOP),
        ("Permission denied: ./train.sh", Verdict.STOP),
        ("Resource temporarily unavailable: python", Verdict.UNKNOWN),
    ],
)
def test_a_worker_that_never_ran(error: str, verdict: Verdict) -> None:
    """The agent knows why the worker never ran, and no log line can say more."""
    end = ending(failed(error=error))
    assert end.verdict is verdict
    assert error in end.sentence


@pytest.mark.parametrize(
    ("error", "names"),
    [
        ("No such program (looked on PATH): pyton", {"PATH"}),
        (
            "container.runtime: this node has no apptainer or singularity on its PATH (/bin)",
            {"`setup`", "`container`"},
        ),
        ("container.image: /images/train.sif does not exist on this node", {"`container`"}),
    ],
)
def test_the_hint_names_what_to_correct(error: str, names: set[str]) -> None:
    """The hint names the setting to correct: for a container that cannot start neither the command nor the worker's
    PATH."""
    hint = ending(failed(error=error)).hint
    assert {each for each in ("PATH", "`setup`", "`container`") if each in hint} == names


@pytest.mark.parametrize(
    ("how", "expected"),
    [(failed(signal=6), 6), (failed(exit_code=143), 15), (failed(exit_code=93), None), (failed(exit_code=255), None)],
)
def test_signal_of(how: Failed, expected: int | None) -> None:
    """A shell adds 128 to a signal's number, but not every large exit code is a signal."""
    assert signal_of(how) == expected


def test_a_kill_is_not_explained_by_an_exception() -> None:
    """An exception does not explain a kill: a process that raises exits with 1. The out-of-memory killer explains
    it."""
    assert contradicts(failed(signal=9), "key_error", 3)
    assert not contradicts(failed(signal=9), "host_oom", 3)
    assert not contradicts(failed(signal=9), "key_error", 5)
    assert not contradicts(failed(exit_code=1), "key_error", 3)
