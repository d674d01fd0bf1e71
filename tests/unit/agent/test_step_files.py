"""How far a cycle has come, according to an iteration file and the logs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.agent.progress import TAIL_BYTES, StepFiles, number, step_in, step_of, tail
from nvrx_slurm.jobspec.model import ProgressSpec
from nvrx_slurm.util.clock import SystemClock

PATTERN = "iteration +([0-9,]+)/"


def files(folder: Path, **named: str | None) -> StepFiles:
    return StepFiles(ProgressSpec(**named), SystemClock())  # type: ignore[arg-type]


def test_nothing_is_read_unless_it_is_named(tmp_path: Path) -> None:
    """Without an iteration file or a log pattern, no file is read."""
    assert not files(tmp_path).are_named
    assert files(tmp_path, log_pattern=PATTERN).are_named
    assert files(tmp_path, iteration_file="f").are_named


@pytest.mark.parametrize(
    ("text", "step"),
    [("1200", 1200), ("1200\n", 1200), (" 7 ", 7), ("", None), ("release", None), ("12.5", None), ("-3", None),
     ("9" * 40, None), ("1 2", None)],
)  # fmt: skip
def test_an_iteration_file_holds_one_number(tmp_path: Path, text: str, step: int | None) -> None:
    """An iteration file has one number, as Megatron writes it; anything else is no step."""
    (tmp_path / "latest").write_text(text)
    assert step_in(tmp_path / "latest") == step
    assert step_in(tmp_path / "missing") is None


async def test_the_last_match_of_the_furthest_rank_counts(tmp_path: Path) -> None:
    """The last match of the furthest rank counts: only this node's ranks, both of their streams, with ANSI colours
    and progress bars."""
    (tmp_path / "rank-0.out").write_bytes(b"iteration 5/9\niteration 6/9\n \x1b[32miteration 7/9\x1b[0m loss\n")
    (tmp_path / "rank-1.err").write_bytes(b"\riteration 1/9 \riteration 1,008/9 \riteration 1,")
    (tmp_path / "rank-2.out").write_bytes(b"iteration 5000/9\n")
    assert await files(tmp_path, log_pattern=PATTERN).last_step(tmp_path, {0, 1}) == 1008
    assert await files(tmp_path, log_pattern=PATTERN).last_step(tmp_path, {0}) == 7
    assert await files(tmp_path, log_pattern=PATTERN).last_step(tmp_path, {4}) is None


async def test_of_a_file_and_logs_the_furthest_counts(tmp_path: Path) -> None:
    """Of the iteration file and the logs, the higher step counts."""
    (tmp_path / "rank-0.out").write_bytes(b"iteration 5/9\n")
    latest = tmp_path / "latest"
    both = files(tmp_path, log_pattern=PATTERN, iteration_file=str(latest))
    assert await both.last_step(tmp_path, {0}) == 5
    latest.write_text("8")
    assert await both.last_step(tmp_path, {0}) == 8


async def test_torn_lines_give_no_step(tmp_path: Path) -> None:
    """A number that is cut off, as by a worker that dies while it prints, is not taken for a smaller step."""
    path = tmp_path / "rank-0.out"
    path.write_bytes(b"iteration 1234\niteration 12")
    bare = files(tmp_path, log_pattern="iteration ([0-9]+)")
    assert await bare.last_step(tmp_path, {0}) == 1234
    path.write_bytes(b"iteration 1234567\n" + b"x" * (TAIL_BYTES - 4) + b"\n")
    assert await files(tmp_path, log_pattern="([0-9]+)").last_step(tmp_path, {0}) is None


async def test_a_log_of_any_size_is_read_from_its_end(tmp_path: Path) -> None:
    """Of a log of any size only the last part is read."""
    path = tmp_path / "rank-0.out"
    with path.open("wb") as file:
        file.truncate(1 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\niteration 77/99\n" + b"chatter\n" * 1000)
    assert await files(tmp_path, log_pattern=PATTERN).last_step(tmp_path, {0}) == 77
    assert sum(map(len, tail(path))) < TAIL_BYTES


async def test_a_file_that_does_not_answer_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that blocks is given up with its thread, and the node gets ready without a step."""
    os.mkfifo(tmp_path / "latest")  # opening it blocks until a writer opens it
    assert await files(tmp_path, iteration_file=str(tmp_path / "latest")).last_step(tmp_path, {0}) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    (tmp_path / "latest").open("wb").close()  # unblock the thread


@given(st.binary(max_size=300))
def test_any_bytes_are_a_step_or_none(data: bytes) -> None:
    """Any bytes that a worker prints give a step or none, never an error."""
    step = step_of(re.compile(PATTERN.encode()), data)
    assert step is None or step >= 0
    assert (number(data) is None) or int(data.replace(b",", b"")) == number(data)
