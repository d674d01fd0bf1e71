"""Following a job's output up to its last line."""

from __future__ import annotations

from pathlib import Path

from nvrx_slurm.report.logs import LAST_WORDS_S, Reader, Selection, follow_logs
from tests.still_clock import StillClock
from tests.unit.report.recorder import ended, say, write


def test_what_agents_write_after_the_jobs_end_is_shown(tmp_path: Path) -> None:
    """The journal has the job's end while an agent still has to write its workers' last lines."""
    folder = write(tmp_path, ended())
    say(folder, "a\n")
    looks = iter(["last words\n", ""])

    def gone() -> bool:
        say(folder, words := next(looks))
        return not words

    shown = follow_logs(folder, Reader(folder, Selection(replica="main-0", rank=0)), clock=StillClock(), gone=gone)
    assert b"".join(chunk.data for chunk in shown) == b"a\nlast words\n"


def test_the_wait_for_an_agent_that_never_ends_is_bounded(tmp_path: Path) -> None:
    """The reader stops at its bound, for example if the host was killed after the job's end."""
    folder = write(tmp_path, ended())
    say(folder, "a\n")
    clock = StillClock()
    shown = follow_logs(folder, Reader(folder, Selection(replica="main-0", rank=0)), clock=clock, gone=lambda: False)
    assert b"".join(chunk.data for chunk in shown) == b"a\n"
    assert clock.now < 1000.0 + LAST_WORDS_S + 1.0
