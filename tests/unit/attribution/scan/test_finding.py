"""Which files are logs, and of which rank and node."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from nvrx_slurm.attribution.scan import find_logs, scan
from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal.verdicts import FailureKey, Inquiry
from tests.unit.attribution.scan.logs import CATALOGUE

KEY = FailureKey(job="/job", generation=0, replica="main-0", cycle=0)
INQUIRY = Inquiry(key=KEY, paths=(), nodes=("n1", "n10"), workers_per_node=4)


def write(path: Path, content: bytes = b"x\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "rank", "node", "kind"),
    [
        ("rank-5.out", 5, "n10", "out"),
        ("rank-5.err", 5, "n10", "err"),
        ("stacks/rank-5.txt", 5, "n10", "stacks"),
        ("health/n1.txt", None, "n1", "health"),
        ("slurm-123.out", None, None, "mixed"),
        ("job-123-n10.out", None, "n10", "mixed"),
        ("n10/attempt_0/3/stderr.log", 7, "n10", "err"),
        ("attempt_0/3/stdout.log", None, None, "out"),
        ("nemo_log_globalrank-3_localrank-1.txt", 3, "n1", "mixed"),
        ("log_local_rank_3.txt", None, None, "mixed"),
        ("3.log", 3, "n1", "mixed"),
        ("stderr.3", 3, "n1", "err"),
        ("rank_6/train.log.gz", 6, "n10", "mixed"),
        ("node17.log", None, "node17", "mixed"),
        ("train-2026.log", None, None, "mixed"),
    ],
)
def test_names(tmp_path: Path, name: str, rank: int | None, node: str | None, kind: str) -> None:
    """A file's path shows its rank, its node and its kind, as far as the job's nodes are known."""
    write(tmp_path / name)
    (file,) = find_logs([tmp_path], INQUIRY)
    assert (file.path, file.rank, file.node, file.kind) == (tmp_path / name, rank, node, kind)


def test_torchrun_on_one_node(tmp_path: Path) -> None:
    """If there is one node, or none is known, torchrun's number is the rank."""
    write(tmp_path / "attempt_0/3/stderr.log")
    assert find_logs([tmp_path], None)[0].rank == 3


def test_flight_recorder(tmp_path: Path) -> None:
    """Dumps of the flight recorder are known by name and content, and are not read as text."""
    dump = {"version": "2.10", "pg_config": {}, "entries": []}
    write(tmp_path / "nccl_trace_rank_3", pickle.dumps(dump))
    write(tmp_path / "comm_trace_4.json", json.dumps(dump).encode())
    write(tmp_path / "my_trace.log", b"ValueError: x\n")
    files = find_logs([tmp_path], None)
    assert [(file.rank, file.kind) for file in files] == [
        (4, "flight_recorder"),
        (None, "mixed"),
        (3, "flight_recorder"),
    ]
    assert len(scan(files, CATALOGUE).hits) == 2


def test_links(tmp_path: Path) -> None:
    """Loops of links are walked once; a file with several names counts once, and a dangling link not at all."""
    log = write(tmp_path / "logs" / "a.log")
    (tmp_path / "logs" / "loop").symlink_to(tmp_path)
    (tmp_path / "logs" / "b.log").symlink_to(log)
    (tmp_path / "logs" / "gone.log").symlink_to(tmp_path / "nowhere")
    assert len(find_logs([tmp_path, tmp_path / "logs", log], None)) == 1


def test_what_is_no_log(tmp_path: Path) -> None:
    """Programs, checkpoints, hidden files and FIFOs below a folder are left out; a program that is named itself
    counts."""
    for name in ("train.py", "model.pt", ".git/a.log", "__pycache__/a.txt"):
        write(tmp_path / name)
    os.mkfifo(tmp_path / "fifo.log")
    with pytest.raises(UsageError, match="no log below"):
        find_logs([tmp_path], None)
    assert len(find_logs([tmp_path / "train.py"], None)) == 1


@pytest.mark.parametrize("path", ["/dev/zero", "/nowhere/a.log"])
def test_refused(path: str) -> None:
    """A path that does not exist, or cannot be a log, is an error that says so."""
    with pytest.raises(UsageError, match=r"is a device|cannot be read: No such file"):
        find_logs([Path(path)], None)


def test_job_folder(tmp_path: Path) -> None:
    """In a job's folder only the logs count, not the journal, which quotes them."""
    write(tmp_path / "plan.json", b"{}")
    write(tmp_path / "events.jsonl")
    log = write(tmp_path / "logs/main-0/gen-0/cycle-0/rank-0.err")
    assert [file.path for file in find_logs([tmp_path], None)] == [log]


def test_many(tmp_path: Path) -> None:
    """Thousands of files in one folder are found, each once, in the order of their paths."""
    for number in range(5000):
        (tmp_path / f"rank-{number}.out").write_bytes(b"x\n")
    files = find_logs([tmp_path], None)
    assert len(files) == 5000
    assert files == sorted(files, key=lambda file: file.path)


def test_folder_that_cannot_be_listed(tmp_path: Path) -> None:
    """A folder that cannot be listed is a problem of the scan."""
    log = write(tmp_path / "a.log")
    os.link(log, tmp_path / "b.log")
    folder = find_logs([tmp_path], None)[0]
    log.unlink()
    (tmp_path / "b.log").unlink()
    folder.path.mkdir()
    assert "is a folder that cannot be listed" in scan([folder], CATALOGUE).problems[0]
