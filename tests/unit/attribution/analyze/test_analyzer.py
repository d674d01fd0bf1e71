"""The analysis on an event loop."""

from __future__ import annotations

import asyncio
import gzip
import os
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.attribution.analyze import analyzer as analyzer_module
from nvrx_slurm.attribution.analyze.analysis import inquiry_for
from nvrx_slurm.attribution.analyze.analyzer import Analyzer, analyze_sync
from nvrx_slurm.errors import ConfigError, SourceError, UsageError
from nvrx_slurm.journal.verdicts import Attribution, Failed, FailureKey, Inquiry, Verdict

NO_MODULE = """\
Traceback (most recent call last):
  File "/work/train.py", line 3, in <module>
    import flash_attn
ModuleNotFoundError: No module named 'flash_attn'
"""


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A cycle whose rank 1 could not import a module."""
    folder = tmp_path / "cycle-0"
    folder.mkdir()
    (folder / "rank-0.out").write_text("loading\n")
    (folder / "rank-1.err").write_text(NO_MODULE)
    return folder


@pytest.fixture
async def analyzer() -> AsyncIterator[Analyzer]:
    """An analyzer with the shipped rules."""
    made = Analyzer()
    yield made
    await made.close()


def test_a_file_name_that_is_not_utf_8(logs: Path) -> None:
    """If a file's name is not UTF-8, the answer can still be written as JSON, including its problem with a torn
    file."""
    folder = Path(os.fsdecode(os.fsencode(logs) + b"/job-\xff"))
    folder.mkdir()
    (logs / "rank-1.err").rename(folder / "rank-1.err")
    (folder / "rank-2.err.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    answer = analyze_sync(inquiry_for([logs]))
    assert msgspec.json.decode(msgspec.json.encode(answer), type=Attribution) == answer
    assert answer.primary is not None and answer.primary.file == f"{logs}/job-\\xff/rank-1.err"
    assert answer.read is not None and len(answer.read.problems) == 1


class Gate:
    """Blocks the examination of logs until it is opened; counts how many began, and keeps the stop event of each."""

    def __init__(self) -> None:
        self.begun: list[threading.Event] = []
        self.entered = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def around(self, analyze_logs: Callable[..., object]) -> Callable[..., object]:
        def held(*arguments: object, stop: threading.Event, **more: object) -> object:
            self.begun.append(stop)
            self._loop.call_soon_threadsafe(self.entered.set)
            while not self._open.wait(0.005) and not stop.is_set():
                pass
            return analyze_logs(*arguments, stop=stop, **more)

        return held


@pytest.fixture
async def gate(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gate]:
    """The real examination, blocked before it begins."""
    made = Gate()
    monkeypatch.setattr(analyzer_module, "analyze_logs", made.around(analyzer_module.analyze_logs))
    yield made
    made.open()


async def test_it_reads_real_logs(analyzer: Analyzer, logs: Path) -> None:
    """It reads real logs, and reports how long it took."""
    found = await analyzer.analyze(inquiry_for([logs]))
    assert (found.source, found.verdict, found.fault, found.ranks) == ("lib", Verdict.STOP, "import_error", (1,))
    assert found.primary is not None
    assert (found.primary.file, found.primary.line) == (str(logs / "rank-1.err"), 4)
    assert (found.cached, found.latency_s > 0) == (False, True)


async def test_an_answer_is_kept_until_a_file_changes(analyzer: Analyzer, logs: Path) -> None:
    """An answer is cached until the device, inode, size or time of a file changes."""
    first = await analyzer.analyze(inquiry_for([logs]))
    second = await analyzer.analyze(inquiry_for([logs]))
    (logs / "rank-0.out").write_text("loading, and more\n")
    third = await analyzer.analyze(inquiry_for([logs]))
    assert (first.cached, second.cached, third.cached) == (False, True, False)
    assert second.primary == first.primary


async def test_another_question_about_the_same_files_is_another(analyzer: Analyzer, logs: Path) -> None:
    """What is known of the failure is part of the inquiry: other facts are not answered from the cache."""
    await analyzer.analyze(inquiry_for([logs]))
    assert not (await analyzer.analyze(asked(logs, Failed(cause="killed", node="n1", rank=1, signal=9)))).cached


async def test_concurrent_askers_share_one_computation(analyzer: Analyzer, logs: Path, gate: Gate) -> None:
    """A hundred concurrent askers share one computation."""
    asking = [asyncio.ensure_future(analyzer.analyze(inquiry_for([logs]))) for _ in range(100)]
    await gate.entered.wait()
    gate.open()
    answers = await asyncio.gather(*asking)
    assert {answer.fault for answer in answers} == {"import_error"}
    assert len(gate.begun) == 1


async def test_an_asker_that_is_cancelled_takes_nothing_from_the_others(
    analyzer: Analyzer, logs: Path, gate: Gate
) -> None:
    """If one asker is cancelled, the computation goes on for the others."""
    leaving, staying = (asyncio.ensure_future(analyzer.analyze(inquiry_for([logs]))) for _ in range(2))
    await gate.entered.wait()
    while sum(each.askers for each in analyzer._running.values()) < 2:  # noqa: ASYNC110 -- it sets no event
        await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    gate.open()
    assert (await staying).fault == "import_error"
    assert leaving.cancelled()
    assert not gate.begun[0].is_set()


async def test_the_last_asker_that_leaves_ends_the_computation(analyzer: Analyzer, logs: Path, gate: Gate) -> None:
    """When the last asker leaves, the thread is asked to stop; the next asker starts a new computation."""
    asking = asyncio.ensure_future(analyzer.analyze(inquiry_for([logs])))
    await gate.entered.wait()
    asking.cancel()
    await asyncio.wait([asking])
    assert gate.begun[0].is_set()
    gate.open()
    assert (await analyzer.analyze(inquiry_for([logs]))).fault == "import_error"


async def test_after_its_time_it_answers_with_a_timeout(analyzer: Analyzer, logs: Path, gate: Gate) -> None:
    """At its time limit the verdict is TIMEOUT, and the problem says what took too long."""
    found = await analyzer.analyze(inquiry_for([logs]), timeout_s=1.0)
    assert (found.verdict, found.problem) == (Verdict.TIMEOUT, "the analysis took longer than 1 s")
    assert gate.begun[0].is_set()


async def test_closing_ends_every_wait(analyzer: Analyzer, logs: Path, gate: Gate) -> None:
    """Everything that waits gets an error that says so, and so does every later inquiry."""
    asking = asyncio.ensure_future(analyzer.analyze(inquiry_for([logs])))
    await gate.entered.wait()
    await analyzer.close()
    with pytest.raises(SourceError, match="closed before it had an answer"):
        await asking
    with pytest.raises(SourceError, match="is closed"):
        await analyzer.analyze(inquiry_for([logs]))


async def test_without_any_log_an_exit_code_is_enough(analyzer: Analyzer, tmp_path: Path) -> None:
    """A worker may end before it prints: without any log its signal gives the answer."""
    found = await analyzer.analyze(asked(tmp_path / "none", Failed(cause="killed", node="n1", rank=1, signal=9)))
    assert (found.verdict, found.fault) == (Verdict.UNKNOWN, "killed")


async def test_nothing_to_read_and_nothing_known_is_an_error(analyzer: Analyzer, tmp_path: Path) -> None:
    """The error names the path."""
    with pytest.raises(UsageError, match="none"):
        await analyzer.analyze(inquiry_for([tmp_path / "none"]))


async def test_the_cycle_before_is_looked_at(analyzer: Analyzer, tmp_path: Path) -> None:
    """The same exception at the same place, twice, is a STOP, although no rule knows it."""
    text = 'Traceback (most recent call last):\n  File "/work/train.py", line {}, in step\n{}\n'
    for cycle, line in ((0, 41), (1, 41)):
        (tmp_path / f"cycle-{cycle}").mkdir()
        crash = text.format(line, "schedule.BadScheduleError: warm-up 100 is longer than the run")
        (tmp_path / f"cycle-{cycle}" / "rank-0.err").write_text(crash)
    once = inquiry_for([tmp_path / "cycle-1"])
    twice = Inquiry(key=once.key, paths=once.paths, earlier=(str(tmp_path / "cycle-0"),))
    assert (await analyzer.analyze(once)).verdict is Verdict.UNKNOWN
    found = await analyzer.analyze(twice)
    assert (found.verdict, found.fault) == (Verdict.STOP, "exception")
    assert "The same happened once before" in found.explanation


async def test_packed_logs_are_judged_by_what_follows_too(analyzer: Analyzer, tmp_path: Path) -> None:
    """In a packed log too, an exception with training steps after it was caught."""
    steps = "".join(f"step {step} loss 2.1\n" for step in range(3000))
    with gzip.open(tmp_path / "train.log.gz", "wt") as file:
        file.write(NO_MODULE + steps)
    found = await analyzer.analyze(inquiry_for([tmp_path]))
    assert (found.verdict, found.fault) == (Verdict.UNKNOWN, "unknown")


async def test_an_old_stamp_above_a_traceback_is_not_its_time(analyzer: Analyzer, tmp_path: Path) -> None:
    """Progress in the other file after an old stamp does not mean that the error below the stamp was survived."""
    start = "2026-11-21 10:00:00,000 WARNING root: slow file system\n"
    steps = "".join(f"2026-11-21 12:{step:02}:00,000 INFO train: step {step} loss 2.1\n" for step in range(60))
    (tmp_path / "rank-0.err").write_text(start + NO_MODULE)
    (tmp_path / "rank-0.out").write_text(steps)
    assert (await analyzer.analyze(inquiry_for([tmp_path]))).verdict is Verdict.STOP


async def test_a_logged_error_before_progress_in_the_other_file_was_survived(
    analyzer: Analyzer, tmp_path: Path
) -> None:
    """The stamp on the logger's line shows that the progress in the other file came later."""
    start = "2026-11-21 10:00:00,000 ERROR root: cannot use the fast kernel\n"
    steps = "".join(f"2026-11-21 12:{step:02}:00,000 INFO train: step {step} loss 2.1\n" for step in range(60))
    (tmp_path / "rank-0.err").write_text(start + NO_MODULE)
    (tmp_path / "rank-0.out").write_text(steps)
    assert (await analyzer.analyze(inquiry_for([tmp_path]))).verdict is Verdict.UNKNOWN


async def test_a_wrong_rule_is_reported_at_the_start(tmp_path: Path) -> None:
    """A wrong rule is reported at the start, not at the first failure."""
    (tmp_path / "mine.yaml").write_text("my_rule:\n  fault: x\n")
    with pytest.raises(ConfigError) as caught:
        Analyzer(rules=[tmp_path / "mine.yaml"])
    assert caught.value.key == "my_rule.pattern"


def asked(folder: Path, failed: Failed) -> Inquiry:
    """An inquiry about one failure whose logs are in a folder."""
    key = FailureKey(job="/jobs/1", generation=0, replica="main-0", cycle=0, rank=failed.rank)
    return Inquiry(key=key, paths=(os.fspath(folder),), failed=failed)


def test_an_answer_without_an_event_loop(logs: Path, tmp_path: Path) -> None:
    """It can be called from any number of threads; errors in the inquiry or the rules are raised unchanged."""
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: analyze_sync(inquiry_for([logs])), range(8)))
    assert {answer.fault for answer in answers} == {"import_error"}
    with pytest.raises(UsageError):
        analyze_sync(inquiry_for([tmp_path / "none"]))
    (tmp_path / "mine.yaml").write_text("mine: 3\n")
    with pytest.raises(ConfigError):
        analyze_sync(inquiry_for([logs]), rules=[tmp_path / "mine.yaml"])


def test_a_defect_of_the_analysis_is_an_error_of_the_source(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception becomes a `SourceError`, so that a command reports it in one line."""

    def torn(*_: object, **__: object) -> None:
        raise OSError("the connection was lost")

    monkeypatch.setattr(analyzer_module, "analyze_logs", torn)
    with pytest.raises(SourceError, match="OSError: the connection was lost"):
        analyze_sync(inquiry_for([logs]))
