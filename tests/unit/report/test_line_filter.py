"""The last lines, those that match, and those since a moment."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from nvrx_slurm.agent.output import Output
from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.report.line_filter import LineFilter
from nvrx_slurm.report.logs import Chunk, MergedReader, RankLog, Reader, Selection
from nvrx_slurm.report.words import chosen_events, event_names
from nvrx_slurm.util.output_times import marks_path
from tests.still_clock import StillClock
from tests.waiting import until

AT = 1_790_000_000.0


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    folder = JobFolder(tmp_path / "job")
    folder.create()
    return folder


def say(folder: JobFolder, text: str, *, rank: int = 0, cycle: int = 0) -> Path:
    path = folder.cycle_logs("main-0", 0, cycle) / f"rank-{rank}.out"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def last(folder: JobFolder, lines: int, selection: Selection) -> str:
    reader = Reader(folder, selection)
    reader.skip_to_last(lines)
    return b"".join(chunk.data for source in (reader.read(), reader.rest()) for chunk in source).decode()


def test_the_last_lines_are_those_of_the_last_files(folder: JobFolder) -> None:
    """They may be in several files, with or without a newline at the end; a request for more lines returns all."""
    say(folder, "1\n2\n3\n")
    say(folder, "4\n5", cycle=1)
    one = Selection(rank=0)
    assert [last(folder, n, one) for n in (0, 1, 2, 3, 5, 9)] == [
        "", "5", "4\n5", "3\n4\n5", "1\n2\n3\n4\n5", "1\n2\n3\n4\n5"
    ]  # fmt: skip
    assert last(folder, 2, Selection(cycle=0)) == "[main-0 0] 2\n[main-0 0] 3\n"


def test_the_end_of_a_long_file_is_found_without_reading_it_whole(folder: JobFolder) -> None:
    """Lines longer than a block, too."""
    folder.job_log.write_bytes(b"x" * (3 << 20) + b"\n" + b"y" * (2 << 20) + b"\nz\n")
    reader = MergedReader(folder)
    reader.skip_to_last(2)
    assert b"".join(chunk.data for chunk in reader.read()) == b"y" * (2 << 20) + b"\nz\n"


def through(lines: LineFilter, path: Path, *pieces: bytes, label: bool = False) -> bytes:
    file = RankLog(0, 0, "main-0", 0, 0, path)
    shown = [kept.data for piece in pieces for kept in lines.feed(Chunk(file, piece))]
    return b"".join([*shown, *(chunk.data for chunk in lines.rest())])


def test_lines_are_matched_whole(tmp_path: Path) -> None:
    """This holds wherever a read splits the file."""
    lines = LineFilter(pattern=re.compile(b"(?i)loss"), since=None)
    assert through(lines, tmp_path / "f", b"step 1 lo", b"ss 3\nstep 2\nLoss", b" 4") == b"step 1 loss 3\nLoss 4"


def stamped(offset_s: float) -> str:
    from datetime import UTC, datetime

    return f"{datetime.fromtimestamp(AT + offset_s, UTC):%Y-%m-%dT%H:%M:%S}Z"


def test_lines_without_a_stamp_have_the_time_of_those_before(tmp_path: Path) -> None:
    """This is done for each rank of a merged log separately."""
    text = "".join(
        f"[main-0 {rank}] {line}\n"
        for rank, line in (
            (0, f"{stamped(0)} early"),
            (1, f"{stamped(5)} early too"),
            (0, f"{stamped(20)} late"),
            (1, "Traceback: early still"),
            (0, "Traceback: late"),
            (1, f"{stamped(21)} late too"),
        )
    )
    path = tmp_path / "job.log"
    path.write_text(text)
    lines = LineFilter(pattern=None, since=AT + 10)
    shown = through(lines, path, text.encode()).decode().splitlines()
    assert [line.split(maxsplit=2)[1] for line in shown] == ["0]", "0]", "1]"]
    assert [line.rsplit("] ")[1].removeprefix(stamped(20)).removeprefix(stamped(21)) for line in shown] == [
        " late",
        "Traceback: late",
        " late too",
    ]
    assert not lines.is_untimed


def test_a_file_without_stamps_is_shown_if_it_was_written_to_since(tmp_path: Path) -> None:
    """Such a file is marked as untimed; lines written after the reader has caught up are always shown."""
    path = tmp_path / "f"
    path.write_text("a\n")
    os.utime(path, (AT, AT))
    new, old = LineFilter(pattern=None, since=AT - 1), LineFilter(pattern=None, since=AT + 1)
    assert (through(new, path, b"a\n"), new.is_untimed) == (b"a\n", True)
    assert (through(old, path, b"a\n"), old.is_untimed) == (b"", False)
    old.caught_up()
    assert through(old, path, b"b\n") == b"b\n"


def test_a_file_without_stamps_is_read_from_its_agents_marks(folder: JobFolder) -> None:
    """Whole lines are read, to ten seconds; the whole file if it has no marks or none is old enough; nothing if the
    moment is after the last mark's time."""
    path = folder.cycle_logs("main-0", 0, 0) / "rank-0.out"
    clock = StillClock(AT)
    output = Output(None, clock)
    pipe, written = output.capture(path, "", 0), 0
    for index in range(6):  # 0, 6, 12 … seconds: a mark at 0, at 12 (amid a line) and at 24
        clock.now = AT + 6 * index
        written += os.write(pipe, b"1 begun," if index == 1 else f" line {index}\n".encode())
        until(lambda size=written: path.exists() and path.stat().st_size == size, "the output to be in its file")
    os.close(pipe)
    output.close(30.0)

    def since(moment: float) -> str:
        reader = Reader(folder, Selection(rank=0))
        assert [file.path for file in reader.skip_to(moment)] == [path]
        return b"".join(chunk.data for source in (reader.read(), reader.rest()) for chunk in source).decode()

    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 5
    assert since(AT - 99) == since(AT + 10) == "".join(lines)
    assert since(AT + 11) == since(AT + 22) == "".join(lines[1:])
    assert since(AT + 23) == since(AT + 34) == "".join(lines[3:])
    assert since(AT + 35) == ""
    marks_path(path).unlink()
    assert Reader(folder, Selection(rank=0)).skip_to(AT) == set()


def test_events_are_named_by_patterns() -> None:
    """A name, a list or a pattern selects events; one that matches none is an error with the nearest name."""
    assert chosen_events(["node_lost,node_left", "job_*"]) >= {"node_lost", "node_left", "job_started", "job_ended"}
    assert chosen_events(["*"]) == set(event_names())
    assert chosen_events([]) == set()
    with pytest.raises(UsageError, match="did you mean node_lost"):
        chosen_events(["node_lots"])
