"""When an early look at the logs is enough."""

from __future__ import annotations

import asyncio

import pytest

from nvrx_slurm.attribution.sources.base import is_conclusive, look_twice
from nvrx_slurm.journal.verdicts import Attribution, Scope, Verdict
from tests.unit.attribution.sources.scripted import inquiry_of, said

PATIENT_S = 30.0


@pytest.mark.parametrize(
    ("attribution", "rank", "conclusive"),
    [
        pytest.param(said(Verdict.STOP), 3, True, id="the failing rank's own words"),
        pytest.param(said(Verdict.RESTART), 3, True, id="a restart on its own words"),
        pytest.param(said(Verdict.STOP, rank=5), 3, False, id="what a peer says may follow from it"),
        pytest.param(said(Verdict.RESTART, scope=Scope.NETWORK), 3, False, id="any rank says so whose peer has gone"),
        pytest.param(said(Verdict.UNKNOWN), 3, False, id="nothing known"),
        pytest.param(said(Verdict.TIMEOUT), 3, False, id="no answer"),
        pytest.param(said(Verdict.STOP, primary=None), 3, False, id="no evidence"),
        pytest.param(said(Verdict.RESTART, rank=5), None, True, id="a lost node prints no more lines"),
        pytest.param(None, 3, False, id="none at all"),
    ],
)
def test_what_is_conclusive(attribution: Attribution | None, rank: int | None, conclusive: bool) -> None:
    """A verdict that rests on the failing rank's own line is conclusive; any other may change as logs are written."""
    assert is_conclusive(attribution, inquiry_of(rank=rank)) is conclusive


class Logs:
    """Logs that give one answer while they are written, and another when they are complete."""

    def __init__(self, early: Attribution, late: Attribution) -> None:
        self.early, self.late = early, late
        self.looks: list[bool] = []

    async def look(self, whole: bool) -> Attribution:
        self.looks.append(whole)
        return self.late if whole else self.early


async def view(logs: Logs, settled: asyncio.Event, settle_s: float = PATIENT_S) -> Attribution:
    return await look_twice(logs.look, inquiry_of(), settled=settled, settle_s=settle_s)


async def test_a_conclusive_view_is_not_waited_on() -> None:
    """The failing rank's line says what happened, so the source does not wait for the other workers to end."""
    logs = Logs(said(Verdict.STOP), said(Verdict.RESTART))
    assert (await view(logs, asyncio.Event())).verdict is Verdict.STOP
    assert logs.looks == [False]


async def test_half_a_view_is_taken_again_when_the_logs_are_whole() -> None:
    """The first look showed a peer's timeout; the failing rank's own line wins once it is written."""
    logs, settled = Logs(said(Verdict.RESTART, rank=0), said(Verdict.STOP)), asyncio.Event()
    asking = asyncio.create_task(view(logs, settled))
    await asyncio.wait({asking}, timeout=0.01)
    assert not asking.done()
    settled.set()
    assert (await asking).verdict is Verdict.STOP
    assert logs.looks == [False, True]


async def test_whole_logs_are_looked_at_once() -> None:
    """If all workers have ended already, there is no early look."""
    logs, settled = Logs(said(Verdict.UNKNOWN), said(Verdict.STOP)), asyncio.Event()
    settled.set()
    assert (await view(logs, settled)).verdict is Verdict.STOP
    assert logs.looks == [True]


async def test_patience_ends() -> None:
    """If workers do not end in time, the early look is the answer."""
    logs = Logs(said(Verdict.RESTART, rank=0), said(Verdict.STOP))
    assert (await view(logs, asyncio.Event(), settle_s=0.01)).verdict is Verdict.RESTART
    assert logs.looks == [False]
