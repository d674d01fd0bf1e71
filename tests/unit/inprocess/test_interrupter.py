"""One thread for each interruption, and one abort, even if the group fails during it."""

from __future__ import annotations

import contextlib
import datetime
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from nvrx_slurm.inprocess.cycle import CyclePhase
from nvrx_slurm.inprocess.interrupter import Interrupter
from nvrx_slurm.inprocess.progress import ProgressStamps
from nvrx_slurm.inprocess.state import State

WAIT_S = 20.0


class Group:
    """An interrupted group, whose store fails when the test says so."""

    def __init__(self) -> None:
        self.phase, self.cycle = CyclePhase.LEAVING, SimpleNamespace(iteration=0)
        self.fed: list[Any] = []

    def feed(self, event: Any) -> None:
        self.fed.append(event)


class Region:
    """The region of a main thread that is not in an atomic block."""

    @contextlib.contextmanager
    def held(self, report: Any) -> Any:
        yield

    def interrupt(self, *, again_s: float) -> None:
        """The main thread leaves at once."""


@pytest.fixture
def stamps():
    made = ProgressStamps.create()
    yield made
    made.close()


def test_group_that_fails_during_an_abort_aborts_once(stamps):
    """The second thread waits for the first, and so does `join`."""
    entered, go_on, aborts = threading.Event(), threading.Event(), []

    def abort(state: Any) -> None:
        aborts.append(threading.current_thread())
        entered.set()
        go_on.wait(WAIT_S)

    options = SimpleNamespace(
        abort=abort, last_call_wait=datetime.timedelta(0), monitor_thread_interval=datetime.timedelta(seconds=1)
    )
    interrupter = Interrupter(Group(), Region(), stamps, options)  # type: ignore[arg-type]
    state = State(rank=0, world_size=1).freeze()
    interrupter.begin(state)
    assert entered.wait(WAIT_S)
    interrupter.begin(state)
    go_on.set()
    interrupter.join()
    assert len(aborts) == 1
    assert not aborts[0].is_alive()
    interrupter.begin(state)
    interrupter.join()
    assert len(aborts) == 2, "the next interruption aborts again"
