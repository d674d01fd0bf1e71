"""Logs, dumps and inquiries contain what workers and clients put there. None of it costs more than reading it, and
none of it hides what other files show."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvrx_slurm.attribution.analyze.analyzer import analyze_sync
from nvrx_slurm.attribution.analyze.collectives import known_ranks
from nvrx_slurm.attribution.scan import Scan
from nvrx_slurm.jobspec import env
from nvrx_slurm.journal.verdicts import MOST_RANKS, FailureKey, Inquiry, Verdict

CPU_S, MEMORY_BYTES = 40, 3 << 30
"""The bounds of one analysis. The kernel ends a process that exceeds them."""

CRASH = b"""\
Traceback (most recent call last):
  File "/home/u/train.py", line 40, in <module>
    import flash_attn_3
ModuleNotFoundError: No module named 'flash_attn_3'
"""
OOM = b"torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB "
LINE_BYTES = 100_000_000


def analyzed(path: Path, *options: str) -> subprocess.CompletedProcess[bytes]:
    """Run `nvrx-slurm analyze` within these bounds."""

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    return subprocess.run(
        [sys.executable, "-m", "nvrx_slurm", "analyze", str(path), *options],
        env=env.child_environment({}),
        preexec_fn=bounded,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize(
    "line",
    [OOM * (LINE_BYTES // len(OOM)), OOM + b"a" * LINE_BYTES, b"a" * LINE_BYTES],
    ids=["matches throughout", "matches once", "matches nowhere"],
)
def test_a_line_of_100_mb_costs_no_more_than_reading_it(tmp_path: Path, line: bytes) -> None:
    """A failure near the line is found, the page shows only a part of the line, and the lines after it keep their
    numbers."""
    (tmp_path / "rank-0.err").write_bytes(CRASH + line + b"\nlast\n" + CRASH)
    found = analyzed(tmp_path, "--json")
    assert found.returncode == 0, found.stderr.decode()
    assert json.loads(found.stdout)["fault"] in ("import_error", "cuda_oom")
    page = analyzed(tmp_path)
    assert page.returncode == 0 and len(page.stdout) < 64 << 10
    scan = analyze_sync(_asking(tmp_path))
    assert scan.primary is not None and scan.primary.line in (4, 5, 10)


def _asking(*paths: Path, **more: Any) -> Inquiry:
    key = FailureKey(job="j", generation=0, replica="main-0", cycle=0)
    return Inquiry(key=key, paths=tuple(map(str, paths)), **more)


DUMP = b"\x80\x02X\x07\x00\x00\x00entriesX\x09\x00\x00\x00pg_config"
"""The beginning of a pickle that is taken for a dump."""
GARBLED = {
    "items of a number": DUMP + b"K\x01(X\x01\x00\x00\x00aK\x01u.",
    "elements of a text": DUMP + b"X\x01\x00\x00\x00a(K\x01K\x01e.",
    "an element of None": DUMP + b"NK\x01a.",
    "a key that is a deep tuple": DUMP + b"})" + b"\x85" * 2_000_000 + b"K\x01s.",
    "each list holds the one before 100 times": (
        DUMP
        + b"]q\x00"
        + b"".join(
            b"](" + b"h" + bytes([level]) + (b"h" + bytes([level])) * 99 + b"eq" + bytes([level + 1])
            for level in range(20)
        )
        + b"}X\x07\x00\x00\x00entries](}X\x0e\x00\x00\x00profiling_nameh\x14ses."
    ),
    "a rank with 5,000 digits": b'{"entries": [], "pg_config": {"0": {"ranks": "' + b"9" * 5000 + b'"}}}',
    "entries that nest": b'{"entries": [{"frames": ' + b"[" * 5000 + b"]" * 5000 + b"}]}",
    "nothing more": DUMP,
}


WELL_FORMED = ("each list holds the one before 100 times", "a rank with 5,000 digits")


@pytest.mark.parametrize("name", GARBLED)
def test_a_garbled_dump_hides_no_other_verdict(tmp_path: Path, name: str) -> None:
    """A garbled dump is at most one problem. What the other ranks' logs and dumps show is reported."""
    (tmp_path / "nccl_trace_rank_0").write_bytes(GARBLED[name])
    (tmp_path / "rank-1.err").write_bytes(CRASH)
    found = analyzed(tmp_path, "--json")
    assert found.returncode == 0, found.stderr.decode()
    assert json.loads(found.stdout)["fault"] == "import_error"
    assert found.stderr.count(b"nccl_trace_rank_0") == (name not in WELL_FORMED)
    assert b"Traceback" not in found.stderr


@pytest.mark.parametrize(
    "line",
    [
        b"[rank" + b"9" * 5000 + b"]: ValueError: x\n",
        b"[default" + b"9" * 5000 + b"]: ValueError: x\n",
        b"[Rank " + b"9" * 150 + b"] Watchdog caught collective operation timeout\n",
        b'Traceback (most recent call last):\n  File "/w/t.py", line ' + b"9" * 5000 + b", in f\nValueError: x\n",
        b"9999-99-99T99:99:99.999999999999999999Z ValueError: x\n",
    ],
    ids=lambda line: line[:9].decode(),
)
def test_an_invalid_number_hides_no_other_verdict(tmp_path: Path, line: bytes) -> None:
    """Python refuses to parse a number of more than 4,300 digits; a rank has at most nine."""
    (tmp_path / "rank-0.err").write_bytes(line)
    (tmp_path / "rank-1.err").write_bytes(CRASH)
    found = analyzed(tmp_path, "--json")
    assert found.returncode == 0, found.stderr.decode()
    assert b"Traceback" not in found.stderr
    assert json.loads(found.stdout)["fault"] in ("import_error", "value_error", "python_error", "nccl_timeout")


def test_a_huge_number_of_ranks_is_not_enumerated(tmp_path: Path) -> None:
    """A wrong plan or request may name 10^15 workers per node. It is answered from the files that exist."""
    inquiry = _asking(tmp_path, nodes=("n1", "n2"), workers_per_node=10**15)
    scan = Scan(hits=(), files=())
    assert known_ranks(inquiry, scan) == frozenset()
    (tmp_path / "rank-1.err").write_bytes(CRASH)
    assert analyze_sync(inquiry).verdict is Verdict.STOP
    assert len(known_ranks(_asking(nodes=("n1", "n2"), workers_per_node=8), scan)) == 16
    assert MOST_RANKS >= 1_000_000
