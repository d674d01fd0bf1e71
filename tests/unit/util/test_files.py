"""Where a job's files lie, and what a full disk leaves of them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from nvrx_slurm.journal.folder import JobFolder, Result
from nvrx_slurm.util.files import RESERVE_BYTES, JobFiles, write_output, write_private
from tests.fault_harness import small_disk


def test_jobs_of_one_id_share_no_folder_in_a_nodes_memory():
    """Two clusters on one machine both have a job 1: neither clears away what the other's workers use."""
    first, second = JobFiles(Path("/a/1")), JobFiles(Path("/b/1"))
    assert first.runtime_name != second.runtime_name
    assert first.runtime_name == JobFiles(Path("/a/1")).runtime_name


RESULT = Result(exit_code=1, reason="x" * 2000, ended_at=1.0)


def test_result_has_room_on_a_full_disk():
    """A job's result is written where nothing else can be."""
    with small_disk("size=1m") as disk:
        folder = JobFolder(disk.path / "1")
        folder.create()
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            write_private(disk.path / "another", b"x" * RESERVE_BYTES)
        assert sorted(path.name for path in disk.path.iterdir()) == ["1", "ballast"]
        folder.write_result(RESULT)
        assert folder.read_result() == RESULT
        assert not folder.reserve_path.exists()


def test_result_is_written_without_a_reserve_too(tmp_path):
    """A folder that an older version made has none; a second result replaces the first."""
    folder = JobFolder(tmp_path)
    folder.write_result(RESULT)
    folder.write_result(Result(exit_code=0, reason="done", ended_at=2.0))
    assert folder.read_result().exit_code == 0


def test_reserve_is_for_one_result_and_set_aside_again(tmp_path):
    """A job that is requeued has room for its next result."""
    folder = JobFolder(tmp_path / "1")
    folder.create()
    folder.write_result(RESULT)
    folder.create()
    assert folder.reserve_path.stat().st_size == RESERVE_BYTES
    assert folder.read_result() == RESULT
    assert folder.reserve_path.stat().st_mode & 0o777 == 0o600


def test_without_replace_the_first_file_stays(tmp_path):
    """The second writer is refused, and leaves nothing behind."""
    write_private(tmp_path / "a", b"first", replace=False)
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "a", b"second", replace=False)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"first"


def test_output_goes_into_a_pipe_or_a_device(tmp_path):
    """Neither is replaced by a file: `-o /dev/stdout`, `-o >(less)`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(pipe, b"page")
    write_output(Path(f"/dev/fd/{reader}"), b"")
    assert os.read(reader, 9) == b"page"
    os.close(reader)
    (full := tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_output(full, b"page")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert full.is_symlink()


@pytest.mark.parametrize("is_there", [True, False])
def test_output_follows_a_link_of_the_user(tmp_path, is_there):
    """To a file, or to where none is yet."""
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to("target")
    if is_there:
        target.write_bytes(b"old")
    write_output(link, b"page")
    assert link.is_symlink()
    assert target.read_bytes() == b"page"
    assert target.stat().st_mode & 0o777 == 0o600


def test_output_into_a_folder_is_refused(tmp_path):
    """And nothing is left there."""
    with pytest.raises(IsADirectoryError):
        write_output(tmp_path, b"page")
    assert list(tmp_path.iterdir()) == []
