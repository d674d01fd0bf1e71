"""The workers' output: complete in their files, line by line and prefixed in the job's log."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from nvrx_slurm.agent.output import LONGEST_LINE_BYTES, Output
from nvrx_slurm.util.clock import SystemClock


@pytest.fixture
def log(tmp_path):
    with (tmp_path / "job.log").open("wb+") as file:
        yield file


def text_of(log):
    log.seek(0)
    return log.read()


def test_lines_are_prefixed_and_files_are_raw(tmp_path, log):
    """The file gets the bytes unchanged; the job's log has the rank before each line, including an incomplete last
    one."""
    output = Output(log.fileno(), SystemClock())
    pipe = output.capture(tmp_path / "a.out", "[r 0] ")
    os.write(pipe, b"one\ntw")
    os.write(pipe, b"o\nthree")
    os.close(pipe)
    output.close(10.0)
    assert (tmp_path / "a.out").read_bytes() == b"one\ntwo\nthree"
    assert text_of(log) == b"[r 0] one\n[r 0] two\n[r 0] three\n"


def test_line_without_end_does_not_fill_the_memory(tmp_path, log):
    """A line of megabytes is passed on in pieces."""
    output = Output(log.fileno(), SystemClock())
    pipe = output.capture(tmp_path / "a.out", "")
    with os.fdopen(pipe, "wb") as file:
        file.write(b"x" * (LONGEST_LINE_BYTES * 100))
    output.close(10.0)
    assert (tmp_path / "a.out").stat().st_size == LONGEST_LINE_BYTES * 100
    assert len(text_of(log).replace(b"\n", b"")) == LONGEST_LINE_BYTES * 100


def test_stuck_job_log_holds_up_no_worker(tmp_path):
    """If no process reads the job's log, the rank's own file still gets all output."""
    reading, writing = os.pipe()
    output = Output(writing, SystemClock())
    pipe = output.capture(tmp_path / "a.out", "")
    with os.fdopen(pipe, "wb") as file:
        for _ in range(4096):
            file.write(b"y" * 4095 + b"\n")
    output.close(0.5)
    assert (tmp_path / "a.out").stat().st_size == 4096 * 4096
    os.close(reading)
    output.close(10.0)  # ends the writing thread, which must not write to the next file with this descriptor
    os.close(writing)


def test_log_that_is_too_slow_has_the_last_lines_and_says_what_is_missing(tmp_path):
    """A job log that cannot be written in time gets the last lines, and a line that says how much is missing."""
    reading, writing = os.pipe()
    output = Output(writing, SystemClock())
    pipe = output.capture(tmp_path / "a.out", "")
    with os.fdopen(pipe, "wb") as file:
        for number in range(8192):
            file.write(b"%1023d\n" % number)
    output.close(0.5)
    with os.fdopen(reading, "rb") as log:
        lines = list(iter(log.readline, b"%1023d\n" % 8191))
    cut = next(index for index, line in enumerate(lines) if line.startswith(b"..."))
    assert int(lines[cut].split()[1]) > 0
    before, after = [int(line) for line in lines[:cut]], [int(line) for line in lines[cut + 1 :]]
    assert before == list(range(before[-1] + 1)) and after == list(range(after[0], 8191))
    assert before[-1] + 1 < after[0]
    os.close(writing)


def test_log_that_cannot_be_written_is_no_error(tmp_path):
    """If the job's log is closed, only the copy is lost; the worker's file is complete."""
    reading, writing = os.pipe()
    os.close(reading)
    output = Output(writing, SystemClock())
    pipe = output.capture(tmp_path / "a.out", "")
    os.write(pipe, b"hello\n")
    os.close(pipe)
    output.close(10.0)
    assert (tmp_path / "a.out").read_bytes() == b"hello\n"
    os.close(writing)


def test_a_file_that_opens_late_does_not_hold_up_the_caller(tmp_path):
    """open(2) may block on a file system, as here on a FIFO without a reader: `capture` returns at once, and nothing
    is lost."""
    os.mkfifo(tmp_path / "a.out")
    output = Output(None, SystemClock())
    pipe = output.capture(tmp_path / "a.out", "")
    os.write(pipe, b"hello\n")
    os.close(pipe)
    assert not output.wait_drained(0.0)
    assert (tmp_path / "a.out").read_bytes() == b"hello\n"
    output.close(10.0)


def test_error_of_a_close_ends_no_reading(tmp_path, monkeypatch):
    """NFS may report an exceeded quota only at close(2); the other pipes, and those of later cycles, are still
    read."""
    job_log = os.open(os.devnull, os.O_WRONLY)
    output = Output(job_log, SystemClock())
    close, denied = os.close, []

    def close_late(descriptor):
        name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        close(descriptor)
        if name == str(tmp_path / "a.out"):
            denied.append(name)
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "close", close_late)
    for name in ("a.out", "b.out"):
        pipe = output.capture(tmp_path / name, "")
        os.write(pipe, b"x\n" * 1000)
        os.close(pipe)
    assert output.wait_drained(10.0)
    output.close(10.0)
    os.close(job_log)
    assert denied
    assert (tmp_path / "b.out").read_bytes() == b"x\n" * 1000
