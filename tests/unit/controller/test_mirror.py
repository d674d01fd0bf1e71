"""The journal's copy: complete, in order, without repetitions."""

from __future__ import annotations

import pytest

from nvrx_slurm.controller.mirror import Mirror, last_number, read_copy
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import Entry, Tick, entry_from_json, entry_to_json
from nvrx_slurm.report.source import so_far
from tests.fault_harness import small_disk
from tests.waiting import until


def entries(first, last):
    return [Entry(n=n, t=float(n), record=Tick()) for n in range(first, last + 1)]


def numbers(folder):
    return [entry.n for entry in so_far(JobFolder(folder), live=False)]


def test_new_controller_goes_on_where_the_copy_ends(tmp_path):
    """Entries that the file has are not written again; entries that it lacks are."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(entry_to_json(e) + b"\n" for e in entries(1, 3)))
    copy = Mirror(path)
    copy.start(entries(1, 5))
    copy.add(entries(6, 7))
    copy.close(5.0)
    assert numbers(tmp_path) == list(range(1, 8))


def test_entries_that_a_replaced_controller_copies_late_count_once(tmp_path):
    """The replaced controller was frozen in a commit, and copies it after its successor did; the next controller
    continues after the newest entry."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(lines(1, 3))
    replaced, successor = Mirror(path), Mirror(path)
    replaced.start(entries(1, 3))
    successor.start(entries(1, 3))
    successor.add(entries(4, 9))
    successor.close(5.0)
    replaced.add(entries(4, 5))
    replaced.close(5.0)
    assert last_number(path) == 9
    assert read_copy(path) == entries(1, 9)


def test_torn_last_line_is_cut_off_and_written_whole(tmp_path):
    """A crash in the middle of a line loses nothing."""
    path = tmp_path / "events.jsonl"
    whole = b"".join(entry_to_json(e) + b"\n" for e in entries(1, 3))
    path.write_bytes(whole[:-5])
    assert last_number(path) == 2
    copy = Mirror(path)
    copy.start(entries(1, 3))
    copy.close(5.0)
    assert path.read_bytes() == whole


def test_copy_is_rotated_and_read_as_one(tmp_path):
    """A long journal is in several files, oldest first, without a gap."""
    copy = Mirror(tmp_path / "events.jsonl", rotate_bytes=200)
    copy.start([])
    for n in range(1, 41):
        copy.add(entries(n, n))
    copy.close(5.0)
    assert len(list(tmp_path.glob("events.*.jsonl"))) > 1
    assert numbers(tmp_path) == list(range(1, 41))


def test_copy_after_a_rotation_goes_on_after_the_rotated_part(tmp_path):
    """If the newest file has no entry yet, the older parts show where to continue."""
    (tmp_path / "events.1.jsonl").write_bytes(b"".join(entry_to_json(e) + b"\n" for e in entries(1, 4)))
    copy = Mirror(tmp_path / "events.jsonl")
    copy.start(entries(1, 6))
    copy.close(5.0)
    assert numbers(tmp_path) == list(range(1, 7))


def test_rotation_overwrites_no_part_where_an_old_one_was_removed(tmp_path):
    """A user may compress the oldest parts while the job runs: the others stay complete."""
    for part in (2, 3):
        whole = b"".join(entry_to_json(e) + b"\n" for e in entries(part, part))
        (tmp_path / f"events.{part}.jsonl").write_bytes(whole)
    copy = Mirror(tmp_path / "events.jsonl", rotate_bytes=0)
    copy.start(entries(4, 4))
    for n in (5, 6):
        copy.add(entries(n, n))
    copy.close(5.0)
    assert [entry.n for entry in read_copy(tmp_path / "events.jsonl")] == list(range(2, 7))


def whole_lines(path):
    return [entry_from_json(line).n for line in path.read_bytes().splitlines()]


def test_full_disk_tears_no_line_and_loses_none():
    """A line that does not fit on a full disk is cut off as a whole, and written when there is room again."""
    with small_disk("size=64k") as disk:
        path = disk.path / "events.jsonl"
        copy = Mirror(path)
        copy.start(entries(1, 3))
        until(lambda: path.exists() and whole_lines(path) == [1, 2, 3], "the copy has begun")
        ballast = disk.fill()
        copy.add(entries(4, 1000))
        until(lambda: path.stat().st_size > 3500, "the disk is full to the last line that fits")
        ballast.unlink()
        copy.add(entries(1001, 1001))
        copy.close(5.0)
        assert whole_lines(path) == list(range(1, 1002))


def test_disk_that_stays_full_keeps_what_fits(caplog):
    """At the end the copy has as many whole lines as fit, and the log says how many are missing."""
    with small_disk("size=16k") as disk:
        path = disk.path / "events.jsonl"
        copy = Mirror(path)
        copy.start(entries(1, 1000))
        copy.close(5.0)
        there = whole_lines(path)
        assert there == list(range(1, len(there) + 1))
        assert f"the last {1000 - len(there)} entries of the journal are missing there" in caplog.text


def lines(first, last):
    return b"".join(entry_to_json(e) + b"\n" for e in entries(first, last))


@pytest.mark.parametrize(
    ("content", "number", "left"),
    [
        (None, 0, None),
        (b"", 0, b""),
        (b"torn", 0, b""),
        (lines(1, 2), 2, lines(1, 2)),
        (lines(1, 2) + b'{"n":3', 2, lines(1, 2)),
        (lines(1, 2) + b"no entry\n", 2, lines(1, 2) + b"no entry\n"),
        (b"no entry\n", 0, b"no entry\n"),
        (b"x" * (2 << 20) + b"\n" + lines(7, 8) + b"torn", 8, b"x" * (2 << 20) + b"\n" + lines(7, 8)),
    ],
    ids=["missing", "empty", "torn", "whole", "a torn end", "a strange line", "only that", "large"],
)
def test_where_a_copy_ends(tmp_path, content, number, left):
    """The number of the last entry is found after a torn end was cut off."""
    path = tmp_path / "events.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert last_number(path) == number
    assert (path.read_bytes() if path.exists() else None) == left


def test_copy_is_read_from_its_oldest_part_on_without_what_is_torn(tmp_path):
    """`summary` reads it in this way if the job's store is gone."""
    (tmp_path / "events.1.jsonl").write_bytes(lines(1, 2) + b'{"n":3')
    (tmp_path / "events.2.jsonl").write_bytes(lines(4, 5))
    path = tmp_path / "events.jsonl"
    assert read_copy(path) == [*entries(1, 2), *entries(4, 5)]
    path.write_bytes(lines(6, 6))
    assert read_copy(path) == [*entries(1, 2), *entries(4, 6)]


def test_copy_goes_on_after_the_newest_of_its_parts(tmp_path):
    """The names of ten or more parts do not sort by number."""
    for part in (2, 10):
        (tmp_path / f"events.{part}.jsonl").write_bytes(lines(part, part))
    assert Mirror(tmp_path / "events.jsonl").last_number() == 10
    (tmp_path / "events.jsonl").write_bytes(lines(11, 12))
    assert Mirror(tmp_path / "events.jsonl").last_number() == 12


def test_what_cannot_be_written_is_said_once_and_counted_at_the_end(tmp_path, caplog):
    """There is one message however many commits follow; here a file is in the place of the copy's folder."""
    (tmp_path / "folder").touch()
    copy = Mirror(tmp_path / "folder" / "events.jsonl")
    copy.start(entries(1, 2))
    for n in range(3, 6):
        copy.add(entries(n, n))
    copy.close(5.0)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].endswith("what is missing there comes later, and the store has it")
    assert said[1].endswith("the last 5 entries of the journal are missing there")


def test_a_part_is_full_when_it_is_larger_than_the_limit(tmp_path):
    """A part of exactly that size takes another entry."""
    path = tmp_path / "events.jsonl"
    copy = Mirror(path, rotate_bytes=len(lines(1, 1)))
    copy.start(entries(1, 1))
    copy.add(entries(2, 2))
    copy.add(entries(3, 3))
    copy.close(5.0)
    assert [(tmp_path / name).read_bytes() for name in ("events.1.jsonl", "events.jsonl")] == [
        lines(1, 2),
        lines(3, 3),
    ]
