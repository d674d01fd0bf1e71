"""Bob takes the names of agents' runtime folders in /dev/shm: agents use other names, and his files are left
alone."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.journal.folder import clear_runtime_folders
from nvrx_slurm.util import files as files_module
from nvrx_slurm.util.files import RUNTIME_ROOTS, JobFiles
from tests.slurm_harness import CLI

BOUND_S = 60
JOB_ID = "local-7"
KINDS = ("folder", "file", "link", "pipe", "socket")


def take_names(folder: str, job_id: str, target: str) -> list[str]:
    """Take the former names of the agents' folders, with and without a suffix, with another kind of file on each
    node. Bob needs only the job folder's path, which `squeue` and `ps` show."""
    digest = hashlib.sha256(folder.encode()).hexdigest()[:10]
    taken = []
    names = [(f"n{number}{end}", kind) for number, kind in enumerate(KINDS, 1) for end in ("", "-0123456789abcdef")]
    for end, kind in names:
        path = Path("/dev/shm") / f"nvrx-{job_id}-{digest}-{end}"
        if kind == "folder":
            path.mkdir()
            path.chmod(0o777)
        elif kind == "file":
            path.touch()
        elif kind == "link":
            path.symlink_to(target)
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
                bound.bind(str(path))
        taken.append(str(path))
    return taken


@pytest.fixture
def squatted() -> Iterator[list[str]]:
    """The paths that bob has taken, which are removed after the test."""
    paths: list[str] = []
    yield paths
    for path in map(Path, paths):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def test_names_that_bob_has_taken_stop_no_agent(bob, common, squatted):
    """Before this was changed, every agent of the job ended with FileExistsError, and the job with 75."""
    (common / "job.yaml").write_text(json.dumps({"name": "a", "command": "true", "nodes": len(KINDS)}))
    hers = common / "hers"
    hers.mkdir()
    (hers / "s").write_text("hers")
    folder = common / "nvrx-jobs" / JOB_ID
    squatted += bob.run(take_names, str(folder), JOB_ID, str(hers))
    rendered = subprocess.run(
        [*CLI, "render", "--local"], cwd=common, capture_output=True, text=True, timeout=BOUND_S
    )
    done = subprocess.run(
        ["bash", "-s"],
        input=rendered.stdout,
        env={**os.environ, "NVRX_JOB_ID": JOB_ID},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert done.returncode == 0, (folder / "nodes" / "n1.log").read_text()
    left = [path for root in RUNTIME_ROOTS for path in root.glob(f"{JobFiles(folder).runtime_name}-*")]
    assert sorted(map(str, left)) == sorted(squatted)  # alice's folders are removed, and bob's files are left
    assert [path.lstat().st_uid for path in left] == [bob.uid] * len(left)
    assert (hers / "s").read_text() == "hers"


def test_a_runtime_folder_is_elsewhere_if_the_first_root_is_unusable(tmp_path, monkeypatch):
    """A container's /dev/shm may be read-only, or not exist."""
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(files_module, "RUNTIME_ROOTS", (tmp_path / "file", tmp_path / "none", tmp_path / "tmp"))
    assert JobFiles(tmp_path / "7").make_runtime_folder("n1").parent == tmp_path / "tmp"


def test_a_runtime_folder_is_new_and_its_owners_alone(tmp_path):
    """Two agents of one node have different folders, which only their owner can enter. A node's name finds its own
    folders only."""
    files = JobFiles(tmp_path / "7")
    before = os.umask(0)
    try:
        folders = [files.make_runtime_folder(node) for node in ("n1", "n1", "n1-x", "n10")]
    finally:
        os.umask(before)
    assert sorted(files.runtime_folders("n1")) == sorted(folders[:2])
    assert files.runtime_folders("n1-x") == [folders[2]]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    clear_runtime_folders(files, "n1")
    assert sorted(files.runtime_folders()) == sorted(folders[2:])
    clear_runtime_folders(files)
    assert files.runtime_folders() == []
