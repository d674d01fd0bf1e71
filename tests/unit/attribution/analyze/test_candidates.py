"""A traceback that ended no rank is not the cause."""

from __future__ import annotations

import pytest

from nvrx_slurm.attribution.analyze.attributing import attribute
from nvrx_slurm.journal.verdicts import Verdict
from tests.unit.attribution.analyze.evidence import KEY_ERROR, TIMEOUT, failed, hit, inquiry, scan

T = 1795284000.0


def of(non_fatal: str) -> dict[str, str]:
    return {"frames": "train.py:3 in step", "non_fatal": non_fatal}


@pytest.mark.parametrize("non_fatal", ["ignored", "task", "thread", "process", "logged", "warned"])
def test_the_real_cause_wins(non_fatal: str) -> None:
    """A non-fatal exception is not the cause if its ranks lived on to wait for others, however many ranks printed
    it."""
    told = [hit(KEY_ERROR, rank, line=3, t=T, groups=of(non_fatal)) for rank in (0, 1)]
    waited = [hit(TIMEOUT, rank, line=9, t=T + 600) for rank in (0, 1)]
    answer = attribute(inquiry(failed(0)), scan(*told, *waited))
    assert (answer.verdict, answer.fault) == (Verdict.RESTART, "nccl_timeout")


@pytest.mark.parametrize("non_fatal", ["ignored", "task", "thread"])
def test_nothing_else_is_known(non_fatal: str) -> None:
    """A non-fatal exception alone explains no end; one that ended a thread is listed."""
    answer = attribute(inquiry(failed(3)), scan(hit(KEY_ERROR, 3, groups=of(non_fatal))))
    assert (answer.verdict, answer.primary) == (Verdict.UNKNOWN, None)
    assert len(answer.secondary) == (non_fatal == "thread")


@pytest.mark.parametrize(("rank", "verdict"), [(3, Verdict.STOP), (1, Verdict.UNKNOWN)])
def test_a_child_process_of_the_rank_that_failed(rank: int, verdict: Verdict) -> None:
    """An exception that ended a child process is the cause only where it is known that this rank failed."""
    answer = attribute(inquiry(failed(3)), scan(hit(KEY_ERROR, rank, groups=of("process"))))
    assert answer.verdict is verdict


def test_logged_at_the_end() -> None:
    """What the failed rank logged last is the cause: the program ended itself. Later timeouts of other ranks change
    nothing, nor does one of the rank itself while it ends."""
    told = hit(KEY_ERROR, 3, line=3, t=T, groups=of("logged"))
    noticed = [hit(TIMEOUT, 0, line=9, t=T + 600), hit(TIMEOUT, 3, line=9, t=T + 2)]
    answer = attribute(inquiry(failed(3)), scan(told, *noticed))
    assert (answer.verdict, answer.fault, answer.ranks) == (Verdict.STOP, "key_error", (3,))
