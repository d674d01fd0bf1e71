"""The lines that the demo prints during a silence, and its last lines."""

from __future__ import annotations

import queue
from pathlib import Path

from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.lab.demo import DemoRun, Narrator, results
from nvrx_slurm.util.clock import SystemClock
from tests.unit.report.recorder import to_first_cycle
from tests.unit.report.test_recovery import last_recovery

ANSWER_S = 60.0


def test_a_silence_is_filled_with_the_current_state() -> None:
    """Lines are repeated with the newest text, until the narrator's block ends."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    with Narrator(lines.put, SystemClock()) as narrator:
        narrator.say("begin")
        assert lines.get(timeout=ANSWER_S) == "begin"
        narrator.now = "starting"
        assert lines.get(timeout=ANSWER_S) == "  starting"
        narrator.now = "step 3 of 300"
        while (line := lines.get(timeout=ANSWER_S)) == "  starting":
            pass
        assert line == "  step 3 of 300"
    assert not narrator._thread.is_alive()


def test_a_reader_that_has_gone_ends_the_filling_without_a_traceback() -> None:
    """Otherwise pytest would report the exception of the thread."""

    def closed(line: str) -> None:
        raise BrokenPipeError(line)

    with Narrator(closed, SystemClock()) as narrator:
        narrator._thread.join(ANSWER_S)
        assert not narrator._thread.is_alive()


def test_the_last_lines_have_the_time_of_each_phase_and_the_warm_workers() -> None:
    """The time from the death to the first step of all nodes is listed by phase."""
    recorder = to_first_cycle()
    recorder.lose("n2")
    recorder.ready()
    recorder.start_workers(warm=2)
    recorder.progress(76)
    lines = results(0.25, DemoRun(JobFolder(Path("job")), 0, 0.25, last_recovery(recorder)))
    assert lines == [
        ("from the death of n2 to the next step", "975 ms"),
        ("  decided", "2.0 ms"),
        ("  torn down", "90.0 ms"),
        ("  rendezvous closed", "0.0 ms"),
        ("  spawned", "80.0 ms"),
        ("  first step", "803 ms"),
        ("  how workers started", "8 workers warm"),
        ("error without a fault", "0.25"),
        ("error with n2 killed", "0.25"),
        ("", "the same, bit for bit"),
    ]
