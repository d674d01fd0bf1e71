"""The analysis from threads, without an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nvrx_slurm.attribution.analyze.analysis import inquiry_for
from nvrx_slurm.attribution.analyze.analyzer import Analyzer, SyncAnalyzer, analyze_sync
from nvrx_slurm.errors import ConfigError, SourceError, UsageError
from nvrx_slurm.journal.verdicts import Attribution, Inquiry, Verdict


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A log with one exception."""
    (tmp_path / "train.log").write_text("Traceback (most recent call last):\nNameError: name 'lr' is not defined\n")
    return tmp_path


@pytest.fixture
def bridge() -> Iterator[SyncAnalyzer]:
    """One of its own."""
    made = SyncAnalyzer()
    yield made
    made.close()


def ask(bridge: SyncAnalyzer, logs: Path, rules: tuple[Path, ...] = (), timeout_s: float = 60.0) -> Attribution:
    """As `analyze_sync` does."""
    return bridge.analyze(inquiry_for([logs]), rules=rules, llm=None, timeout_s=timeout_s)


def test_it_answers_from_any_thread(bridge: SyncAnalyzer, logs: Path) -> None:
    """All share one loop and one answer."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(bridge, logs), range(32)))
    assert {answer.fault for answer in answers} == {"name_error"}
    assert sum(thread.name == "attribution" for thread in threading.enumerate()) >= 1


def test_a_failed_start_leaves_nothing_behind(bridge: SyncAnalyzer, logs: Path, tmp_path: Path) -> None:
    """Once the rule file is right, the next call starts."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("mine: 3\n")
    with pytest.raises(ConfigError):
        ask(bridge, logs, (mine,))
    mine.write_text("{}\n")
    assert ask(bridge, logs, (mine,)).fault == "name_error"


class Frail(Analyzer):
    """Fails in the middle of its first answer."""

    made = 0

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        Frail.made += 1
        self._fails = Frail.made == 1

    async def analyze(self, inquiry: Inquiry, *, timeout_s: float = 60.0) -> Attribution:
        if self._fails:
            raise OSError("the connection was lost")
        return await super().analyze(inquiry, timeout_s=timeout_s)


def test_an_analyzer_that_failed_half_way_is_made_anew(logs: Path) -> None:
    """It is not used again."""
    bridge = SyncAnalyzer(Frail)
    with pytest.raises(SourceError, match="OSError: the connection was lost"):
        ask(bridge, logs)
    assert ask(bridge, logs).fault == "name_error"
    assert ask(bridge, logs).cached
    assert Frail.made == 2
    bridge.close()


def test_an_answer_that_is_an_error_of_the_asker_keeps_the_analyzer(bridge: SyncAnalyzer, logs: Path) -> None:
    """A path that is not there says nothing of the analyzer."""
    ask(bridge, logs)
    with pytest.raises(UsageError):
        ask(bridge, logs / "none")
    assert ask(bridge, logs).cached


class Stuck(Analyzer):
    """Holds the loop, which then turns no more."""

    freed = threading.Event()

    async def analyze(self, inquiry: Inquiry, *, timeout_s: float = 60.0) -> Attribution:
        Stuck.freed.wait()
        raise asyncio.CancelledError


def test_a_loop_that_stands_still_is_left_behind(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets a TIMEOUT in time, and the next call a new loop."""
    monkeypatch.setattr("nvrx_slurm.attribution.analyze.analyzer.MARGIN_S", 0.05)
    bridge = SyncAnalyzer(Stuck)
    assert ask(bridge, logs, timeout_s=0.05).verdict is Verdict.TIMEOUT
    bridge._make = Analyzer
    monkeypatch.undo()
    assert ask(bridge, logs).fault == "name_error"
    Stuck.freed.set()
    bridge.close()


def test_a_closed_bridge_starts_again(bridge: SyncAnalyzer, logs: Path) -> None:
    """With a new thread."""
    ask(bridge, logs)
    bridge.close()
    assert not ask(bridge, logs).cached


def test_a_forked_child_starts_its_own(logs: Path) -> None:
    """The parent's thread is not there, and its lock may be held."""
    assert analyze_sync(inquiry_for([logs])).fault == "name_error"
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, analyze_sync(inquiry_for([logs])).fault.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "name_error"
    assert os.waitpid(child, 0)[1] == 0
