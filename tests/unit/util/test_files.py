"""Where a job's files are, and which files a full disk still takes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from nvrx_slurm.journal.folder import JobFolder, Result
from nvrx_slurm.util.files import RESERVE_BYTES, JobFiles, write_output, write_private
from tests.fault_harness import small_disk


def test_jobs_of_one_id_share_no_folder_in_a_nodes_memory():
    """Two clusters on one machine both have a job 1: neither removes the folder that the other's workers use."""
    first, second = JobFiles(Path("/a/1")), JobFiles(Path("/b/1"))
    assert first.runtime_name != second.runtime_name
    assert first.runtime_name == JobFiles(Path("/a/1")).runtime_name


RESULT = Result(exit_code=1, reason="x" * 2000, ended_at=1.0)


def test_result_has_room_on_a_full_disk():
    """A job's result can be written when no other file can."""
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
    """A folder of an older version has no reserve; a second result replaces the first."""
    folder = JobFolder(tmp_path)
    folder.write_result(RESULT)
    folder.write_result(Result(exit_code=0, reason="done", ended_at=2.0))
    assert folder.read_result().exit_code == 0


def test_reserve_is_for_one_result_and_set_aside_again(tmp_path):
    """A requeued job has a reserve again for its next result."""
    folder = JobFolder(tmp_path / "1")
    folder.create()
    folder.write_result(RESULT)
    folder.create()
    assert folder.reserve_path.stat().st_size == RESERVE_BYTES
    assert folder.read_result() == RESULT
    assert folder.reserve_path.stat().st_mode & 0o777 == 0o600


def test_without_replace_the_first_file_stays(tmp_path):
    """The second writer is refused, and leaves no file behind."""
    write_private(tmp_path / "a", b"first", replace=False)
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "a", b"second", replace=False)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"first"


def test_output_goes_into_a_pipe_or_a_device(tmp_path):
    """`-o /dev/stdout` and `-o >(less)` write into it, and do not replace it by a file."""
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
    """The target is written, whether or not it exists, and the link stays."""
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to("target")
    if is_there:
        target.write_bytes(b"old")
    write_output(link, b"page")
    assert link.is_symlink()
    assert target.read_bytes() == b"page"
    assert target.stat().st_mode & 0o777 == 0o600


def test_output_into_a_folder_is_refused(tmp_path):
    """No file is left in the folder."""
    with pytest.raises(IsADirectoryError):
        write_output(tmp_path, b"page")
    assert list(tmp_path.iterdir()) == []
