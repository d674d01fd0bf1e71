"""The lease of a job: its file was touched, or was not touched for too long."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.batch.ending import FIRST_LOOKS, LOOKS, MISSING, LeaseWatch, kept, version_of
from nvrx_slurm.jobspec.model import LeaseSpec

TIMEOUT_S = 10.0
OLD, NEW = (1, 0), (2, 0)


def test_a_file_that_changes_was_touched_then():
    """The lease is valid for the timeout from the look that saw the change."""
    watch = LeaseWatch(TIMEOUT_S, 0.0)
    assert not watch.see(OLD, 1.0)
    assert watch.see(NEW, 4.0)
    assert not watch.lapsed(13.9)
    assert watch.lapsed(14.0)


def test_an_old_file_is_no_touch():
    """The first look only sets what later ones are compared with: a job that was in the queue for long finds an old
    file."""
    watch = LeaseWatch(TIMEOUT_S, 0.0)
    watch.see(OLD, 1.0)
    watch.see(OLD, 9.0)
    assert not watch.touched
    assert watch.lapsed(10.0)


def test_a_missing_or_unreadable_file_is_untouched():
    """A file that disappears or cannot be read does not renew the lease; one that appears does."""
    watch = LeaseWatch(TIMEOUT_S, 0.0)
    assert [watch.see(version, 1.0) for version in (OLD, None, OLD, MISSING, None)] == [False] * 5
    assert watch.lapsed(10.0)
    assert watch.see(OLD, 12.0)
    assert not watch.lapsed(21.9)


@given(st.lists(st.tuples(st.sampled_from([None, MISSING, OLD, NEW]), st.floats(0.01, 5.0)), max_size=20))
def test_looks_come_in_time_and_not_too_often(looks):
    """The next look is never after the lease lapses, and a first touch is seen soon."""
    watch, now = LeaseWatch(TIMEOUT_S, 0.0), 0.0
    for version, later_s in looks:
        watch.see(version, now)
        pause_s = watch.pause_s(now)
        assert pause_s <= TIMEOUT_S / (LOOKS if watch.touched else FIRST_LOOKS)
        assert watch.lapsed(now + pause_s) or pause_s > 0.0
        now += later_s


def test_version_of_a_file_shows_touches_and_growth(tmp_path: Path):
    """`touch` and an appended line both change it; a missing file has a version of its own."""
    path = tmp_path / "lease"
    assert version_of(str(path)) == MISSING
    path.touch()
    before = version_of(str(path))
    os.utime(path, ns=(1, 1))
    touched = version_of(str(path))
    with path.open("a") as file:
        file.write("x")
    os.utime(path, ns=(1, 1))
    assert len({before, touched, version_of(str(path)), MISSING}) == 4


def test_a_path_that_cannot_be_read_has_no_version(tmp_path: Path):
    """A file in the place of a folder is an error, and gives no version."""
    (tmp_path / "file").touch()
    assert version_of(str(tmp_path / "file" / "lease")) is None


class FreezingClock:
    """The clock of a process that is frozen once, after its first look at the file, which is touched meanwhile."""

    def __init__(self, file: Path) -> None:
        self._file, self._readings = file, 0

    def monotonic(self) -> float:
        self._readings += 1
        if self._readings == 4:
            os.utime(self._file, ns=(1, 1))
        return 0.0 if self._readings < 4 else 2 * TIMEOUT_S


async def test_a_process_that_was_frozen_looks_before_it_judges(tmp_path: Path):
    """The process may have seen no touch for the timeout only because it did not look."""
    file = tmp_path / "lease"
    file.touch()
    touched = asyncio.Event()
    keeping = asyncio.create_task(
        kept(LeaseSpec(file=str(file), timeout=TIMEOUT_S), FreezingClock(file), touched.set)
    )
    await asyncio.wait([keeping, asyncio.create_task(touched.wait())], return_when=asyncio.FIRST_COMPLETED)
    assert touched.is_set()
    keeping.cancel()
    await asyncio.wait([keeping])
