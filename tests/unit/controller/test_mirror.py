"""The journal's copy: whole, in order, once."""

from __future__ import annotations

from nvrx_slurm.controller.mirror import Mirror, last_number
from nvrx_slurm.folder import JobFolder
from nvrx_slurm.records import Entry, Tick, entry_to_json
from nvrx_slurm.report.source import so_far


def entries(first, last):
    return [Entry(n=n, t=float(n), record=Tick()) for n in range(first, last + 1)]


def numbers(folder):
    return [entry.n for entry in so_far(JobFolder(folder), live=False)]


def test_new_controller_goes_on_where_the_copy_ends(tmp_path):
    """What the file has already is not written again, what it lacks is."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(entry_to_json(e) + b"\n" for e in entries(1, 3)))
    copy = Mirror(path)
    copy.start(entries(1, 5))
    copy.add(entries(6, 7))
    copy.close(5.0)
    assert numbers(tmp_path) == list(range(1, 8))


def test_torn_last_line_is_cut_off_and_written_whole(tmp_path):
    """A crash in the middle of a line costs nothing."""
    path = tmp_path / "events.jsonl"
    whole = b"".join(entry_to_json(e) + b"\n" for e in entries(1, 3))
    path.write_bytes(whole[:-5])
    assert last_number(path) == 2
    copy = Mirror(path)
    copy.start(entries(1, 3))
    copy.close(5.0)
    assert path.read_bytes() == whole


def test_copy_is_rotated_and_read_as_one(tmp_path):
    """A long journal lies in several files, oldest first, without a gap."""
    copy = Mirror(tmp_path / "events.jsonl", rotate_bytes=200)
    copy.start([])
    for n in range(1, 41):
        copy.add(entries(n, n))
    copy.close(5.0)
    assert len(list(tmp_path.glob("events.*.jsonl"))) > 1
    assert numbers(tmp_path) == list(range(1, 41))


def test_copy_after_a_rotation_goes_on_after_the_rotated_part(tmp_path):
    """With nothing in the newest file yet, the older parts tell where to go on."""
    (tmp_path / "events.1.jsonl").write_bytes(b"".join(entry_to_json(e) + b"\n" for e in entries(1, 4)))
    copy = Mirror(tmp_path / "events.jsonl")
    copy.start(entries(1, 6))
    copy.close(5.0)
    assert numbers(tmp_path) == list(range(1, 7))
