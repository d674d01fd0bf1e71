"""Reading the journal's files."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path

import pytest

from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import Entry
from nvrx_slurm.report.journal_file import JournalFile
from nvrx_slurm.report.source import Journal, so_far
from tests.unit.report.recorder import Recorder, ended, lines, with_one_recovery

ENTRIES = with_one_recovery().entries


def numbers(entries: list[Entry]) -> list[int]:
    return [entry.n for entry in entries]


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    folder = JobFolder(tmp_path / "17")
    folder.create()
    return folder


def append(folder: JobFolder, data: bytes) -> None:
    with folder.events_path.open("ab") as file:
        file.write(data)


def test_no_journal_is_an_empty_one(folder: JobFolder) -> None:
    """Before the controller has written any entry, reading returns none, without an error."""
    assert JournalFile(folder).read() == []


def test_each_call_returns_what_is_new(folder: JobFolder) -> None:
    """A reader gets each entry once, in any pieces in which the file grows between its calls."""
    file = JournalFile(folder)
    assert file.read() == []
    append(folder, lines(ENTRIES[:3]))
    assert file.read() == ENTRIES[:3]
    assert file.read() == []
    append(folder, lines(ENTRIES[3:]))
    assert file.read() == ENTRIES[3:]


def test_a_torn_last_line_is_no_entry_until_it_is_whole(folder: JobFolder) -> None:
    """Half a line is not read; it is read when the rest of it has been written."""
    file = JournalFile(folder)
    data = lines(ENTRIES[:2])
    append(folder, data[:-10])
    assert file.read() == ENTRIES[:1]
    append(folder, data[-10:])
    assert file.read() == ENTRIES[1:2]


def test_every_torn_length_is_tolerated(folder: JobFolder) -> None:
    """Wherever a crash cuts the last line, all lines before it are read and no error is raised."""
    whole, last = lines(ENTRIES[:2]), lines(ENTRIES[2:3])
    for length in range(len(last)):
        folder.events_path.write_bytes(whole + last[:length])
        assert numbers(JournalFile(folder).read()) == [1, 2]


def test_a_line_torn_for_good_is_passed_over(folder: JobFolder) -> None:
    """A writer crashed in the middle of a line, and its successor wrote the next line: all other lines are read."""
    torn = lines(ENTRIES[1:2])[:20] + b"\n"
    append(folder, lines(ENTRIES[:1]) + torn + lines(ENTRIES[1:4]))
    assert numbers(JournalFile(folder).read()) == [1, 2, 3, 4]


def test_an_event_of_a_newer_version_is_passed_over(folder: JobFolder) -> None:
    """A reader ignores an unknown event, and an unknown field of a known one."""
    append(folder, b'{"n":1,"t":1.0,"event":"from_the_future"}\n')
    append(folder, b'{"n":2,"t":1.0,"event":"tick","colour":"blue"}\n')
    assert numbers(JournalFile(folder).read()) == [2]


@pytest.mark.parametrize("names", [("events.1.jsonl", "events.2.jsonl"), ("events.2.jsonl", "events.1.jsonl")])
def test_rotated_parts_are_read_oldest_first(folder: JobFolder, names: tuple[str, str]) -> None:
    """The order is by contents, so the numbers in the names may count up or down."""
    (folder.path / names[0]).write_bytes(lines(ENTRIES[:4]))
    (folder.path / names[1]).write_bytes(lines(ENTRIES[4:9]))
    append(folder, lines(ENTRIES[9:]))
    assert so_far(folder, live=False) == ENTRIES
    assert JournalFile(folder, after=6).read() == ENTRIES[6:]


def test_a_rotation_between_two_reads_loses_nothing(folder: JobFolder) -> None:
    """Entries added to a part before it was rotated, and to its successor afterwards, are all read, once."""
    file = JournalFile(folder)
    append(folder, lines(ENTRIES[:3]))
    assert file.read() == ENTRIES[:3]
    append(folder, lines(ENTRIES[3:5]))
    folder.events_path.rename(folder.path / "events.1.jsonl")
    assert file.read() == ENTRIES[3:5]
    append(folder, lines(ENTRIES[5:7]))
    assert file.read() == ENTRIES[5:7]


def test_two_rotations_between_two_reads_lose_nothing(folder: JobFolder) -> None:
    """A part that was created and rotated away between two reads is found under its rotated name."""
    file = JournalFile(folder)
    append(folder, lines(ENTRIES[:3]))
    file.read()
    for number, part in enumerate((ENTRIES[3:5], ENTRIES[5:8]), 1):
        append(folder, lines(part))
        folder.events_path.rename(folder.path / f"events.{number}.jsonl")
    append(folder, lines(ENTRIES[8:10]))
    assert file.read() == ENTRIES[3:10]


def test_entries_that_came_from_elsewhere_are_skipped(folder: JobFolder) -> None:
    """A reader that got entries from the store continues in the file after them."""
    file = JournalFile(folder)
    file.skip_to(5)
    append(folder, lines(ENTRIES[:8]))
    assert file.read() == ENTRIES[5:8]


def test_a_long_journal_is_read_in_order(folder: JobFolder) -> None:
    """There are many parts and many restarts: the numbers follow each other without a gap."""
    recorder: Recorder = with_one_recovery()
    for turn in range(20):
        replica = recorder.job.replicas["main-0"]
        replica.restarted_at.clear()
        recorder.fail(replica.order[turn % 4], turn % 8, exit_code=1)
        recorder.ready()
        recorder.start_workers()
    for number, first in enumerate(range(0, len(recorder.entries), 50), 1):
        (folder.path / f"events.{number}.jsonl").write_bytes(lines(recorder.entries[first : first + 50]))
    assert numbers(JournalFile(folder).read()) == list(range(1, len(recorder.entries) + 1))


def test_an_error_behind_the_first_entries_loses_none(folder: JobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a network file system does not answer for a moment: the reader continues after the entries that it
    has."""
    folder.events_path.write_bytes(lines(ended().entries))
    journal, reads = Journal(folder, live=False), itertools.count(1)
    read = JournalFile.read

    def sometimes(file: JournalFile) -> list[Entry]:
        if next(reads) == 2:
            raise OSError(errno.EIO, "Input/output error")
        return read(file)

    monkeypatch.setattr(JournalFile, "read", sometimes)
    assert journal.catch_up() == ended().entries
    assert journal.catch_up() == []
