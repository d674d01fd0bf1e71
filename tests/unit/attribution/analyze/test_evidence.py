"""What is read in addition to the scan."""

from __future__ import annotations

import gzip
import shutil
import threading
from pathlib import Path

import pytest

from nvrx_slurm.attribution.analyze.aftermath import Nature
from nvrx_slurm.attribution.analyze.attributing import SideEvidence
from nvrx_slurm.attribution.analyze.evidence import context, frame_of, read_evidence, tail_of
from nvrx_slurm.attribution.rules.catalogue import load_catalogue
from nvrx_slurm.attribution.scan import LogFile, find_logs, scan

DUMPS = Path(__file__).with_name("dumps")

STACKS = """\
=== 2026-11-21T18:00:00Z no progress for 30 s | rank 3, pid 4711 (python)
Current thread 0x00007f6eba0f1740 (most recent call first):
  File "/work/train.py", line 9 in older

=== 2026-11-21T18:10:00Z no progress for 30 s | rank 3, pid 4711 (python)
Thread 0x00007f6eba101700 (most recent call first):
  File "/work/loader.py", line 7 in fetch

Current thread 0x00007f6eba0f1740 (most recent call first):
  File "/work/train.py", line 41 in step
  File "/work/train.py", line 60 in <module>

=== 2026-11-21T18:10:00Z no progress for 30 s | rank 3, pid 4712 (python)
Current thread 0x00007f6eba0f1740 (most recent call first):
  File "/work/child.py", line 1 in work
"""


def log(path: Path, rank: int | None = None) -> LogFile:
    """The log of one rank, or of many."""
    return LogFile(path, rank, None, "mixed" if rank is None else "err")


@pytest.mark.parametrize("packed", [False, True])
def test_the_tail_has_the_scans_offsets(tmp_path: Path, packed: bool) -> None:
    """The tail has the scan's offsets, in packed files too, so that the lines after a hit are found."""
    text = "".join(f"line {number}\n" for number in range(1000)).encode()
    path = tmp_path / "train.log"
    path.write_bytes(gzip.compress(text) if packed else text)
    lines = [line for line in tail_of(log(path), most_bytes=100) if line.text]
    assert [line.text for line in lines][-2:] == ["line 998", "line 999"]
    assert all(text[line.offset :].startswith(line.text.encode() + b"\n") for line in lines)
    assert sum(len(line.text) + 1 for line in lines) <= 100


def test_the_tail_has_the_lines_of_the_scan(tmp_path: Path) -> None:
    """The tail splits lines as the scan does: at a progress bar's carriage returns, and after NUL bytes that a file
    system left."""
    text = b"".join(b"\rstep %d/40" % number for number in range(40)) + b"\0\0last\n"
    path = tmp_path / "train.log"
    path.write_bytes(text)
    lines = [line for line in tail_of(log(path), most_bytes=100) if line.text]
    assert [line.text for line in lines][-3:] == ["step 38/40", "step 39/40", "last"]
    assert all(text[line.offset :].startswith(line.text.encode()) for line in lines)


def test_a_bar_that_is_drawn_again_makes_no_step(tmp_path: Path) -> None:
    """A bar that is drawn again without an advance is no step, each bar on its own; one that is drawn again many
    times belongs to a running program."""
    bars = ["Epoch:  33%|###   | 1/3 [00:02<00:04,  2.4s/it]", "Step:  14%|#   | 7/50 [00:00<00:01, 21.8it/s]"]
    path = tmp_path / "train.log"
    path.write_text("\r" + "\r".join([*bars, *bars, "Step:  16%|#   | 8/50 [00:00<00:01, 21.8it/s]"]))
    assert [line.nature for line in tail_of(log(path)) if line.text] == [
        *(Nature.PROGRESS, Nature.PROGRESS),
        *(Nature.CRASH, Nature.CRASH),
        Nature.PROGRESS,
    ]
    path.write_text("\r".join(["120it [00:10, 3.20it/s, loss=2.1]"] * 100))
    assert sum(line.nature is Nature.PROGRESS for line in tail_of(log(path))) > 90


def test_the_tail_knows_whose_line_it_is(tmp_path: Path) -> None:
    """The labels of srun show each line's rank and are removed; colours are removed too."""
    path = tmp_path / "slurm-1.out"
    path.write_text("".join(f"{number % 4}: \x1b[31mstep {number}\x1b[0m\n" for number in range(40)))
    lines = [line for line in tail_of(log(path)) if line.text]
    assert [(line.rank, line.text) for line in lines][-2:] == [(2, "step 38"), (3, "step 39")]


def test_a_file_that_is_gone_has_no_tail(tmp_path: Path) -> None:
    """A file that is gone has no context either."""
    assert list(tail_of(log(tmp_path / "gone"))) == []
    assert context(tmp_path / "gone", 3) == []


def test_the_last_dump_of_a_rank_shows_where_it_is(tmp_path: Path) -> None:
    """The frame is that of the worker's main thread, not of a child's."""
    path = tmp_path / "rank-3.txt"
    path.write_text(STACKS)
    assert frame_of(path) == "train.py:41 in step"


@pytest.mark.parametrize(
    ("line", "numbers"), [(1, [1, 2, 3]), (500, [498, 499, 500, 501, 502]), (1000, [998, 999, 1000])]
)
def test_the_lines_around_one(tmp_path: Path, line: int, numbers: list[int]) -> None:
    """The lines around one come with their numbers; at the edges of the file there are fewer."""
    path = tmp_path / "train.log"
    path.write_text("\n".join(f"line {number}" for number in range(1, 1001)))
    assert context(path, line, before=2, after=2) == [(number, f"line {number}") for number in numbers]


def gathered(folder: Path, stop: threading.Event | None = None) -> SideEvidence:
    """The evidence in all files of a folder."""
    scanned = scan(find_logs([folder], None), load_catalogue())
    return read_evidence(scanned, stop or threading.Event())


def test_dumps_are_read_where_they_lie(tmp_path: Path) -> None:
    """Dumps are found among the logs; one that is broken, or does not name its rank, is a problem, and the others are
    still read."""
    shutil.copy(DUMPS / "nccl_trace_rank_0", tmp_path / "nccl_trace_rank_0")
    (tmp_path / "nccl_trace_rank_1").write_bytes((DUMPS / "nccl_trace_rank_1").read_bytes()[:500])
    shutil.copy(DUMPS / "trace_2.json", tmp_path / "trace_x.json")
    found = gathered(tmp_path)
    assert [dump.rank for dump in found.dumps] == [0]
    assert len(found.problems) == 2
    assert any("nccl_trace_rank_1: no plain pickle: torn" in problem for problem in found.problems)
    assert any("trace_x.json: " in problem for problem in found.problems)


def test_it_ends_when_it_is_stopped() -> None:
    """A reading that is stopped returns what it has read by then."""
    stop = threading.Event()
    stop.set()
    assert gathered(DUMPS, stop).dumps == ()
