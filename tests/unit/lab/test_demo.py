"""How the demo fills silence."""

from __future__ import annotations

import queue

from nvrx_slurm.lab.demo import Narrator
from nvrx_slurm.util.clock import SystemClock

ANSWER_S = 60.0


def test_a_silence_is_filled_with_what_goes_on() -> None:
    """Lines come by themselves, the newest word each time, until the narrator's block ends."""
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
    """pytest makes an error of an exception in a thread."""

    def closed(line: str) -> None:
        raise BrokenPipeError(line)

    with Narrator(closed, SystemClock()) as narrator:
        narrator._thread.join(ANSWER_S)
        assert not narrator._thread.is_alive()
