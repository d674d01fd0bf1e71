"""Which rank and node a line is from."""

from __future__ import annotations

import pytest

from nvrx_slurm.attribution.scan.prefixes import by_srun, label_of, named_in


@pytest.mark.parametrize(
    ("line", "srun", "rank", "node", "local", "rest"),
    [
        (b"[rank3]: RuntimeError", False, 3, None, None, b"RuntimeError"),
        (b"[default3]:RuntimeError", False, None, None, 3, b"RuntimeError"),
        (b"[default3]:[rank19]: RuntimeError", False, 19, None, 3, b"RuntimeError"),
        (b" 3: RuntimeError", True, 3, None, None, b"RuntimeError"),
        (b" 3: RuntimeError", False, None, None, None, b" 3: RuntimeError"),
        (b"12: [rank12]: RuntimeError", True, 12, None, None, b"RuntimeError"),
        (b"node17: 3: RuntimeError", False, 3, "node17", None, b"RuntimeError"),
        (b"[main-0 12] RuntimeError", False, 12, None, None, b"RuntimeError"),
        (b"[1,7]<stderr>: RuntimeError", False, 7, None, None, b"RuntimeError"),
        (b"[prterun-n1-100629@1,7]<stderr>: RuntimeError", False, 7, None, None, b"RuntimeError"),
        (b"[1,7][n2:4711]<stderr>: RuntimeError", False, 7, "n2", None, b"RuntimeError"),
        (b"[1,7][unknown:unknown]<stderr>: RuntimeError", False, 7, None, None, b"RuntimeError"),
        (b"[7]<stderr>: RuntimeError", False, 7, None, None, b"RuntimeError"),
        (b"  | RuntimeError", False, None, None, None, b"RuntimeError"),
        (b"2026: a year", False, None, None, None, b"2026: a year"),
        (b"Error: [rank3] died", False, None, None, None, b"Error: [rank3] died"),
    ],
)
def test_labels(line: bytes, srun: bool, rank: int | None, node: str | None, local: int | None, rest: bytes) -> None:
    """Each label is read, and the line's own text begins after it."""
    label = label_of(line, srun=srun)
    assert (label.rank, label.node, label.local_rank, line[label.begin :]) == (rank, node, local, rest)


def test_by_srun() -> None:
    """A file counts as labelled by srun if nearly all of its lines have a number."""
    assert by_srun(b"0: a\n1: b\n\n0: c\n")
    assert by_srun(b"n1: 0: a\nn2: 1: b\n")
    assert not by_srun(b"a\nb\n0: c\n")
    assert not by_srun(b"")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"node17:12345:12399 [3] NCCL WARN x", (None, "node17")),
        (b"Nov 21 18:00:00 node17 slurmd[12]: x", (None, "node17")),
        (b"2026-11-21T18:00:00.123456Z kernel: x", (None, None)),
        (b"[E1121 18:00:00.1 ProcessGroupNCCL.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 3] Watchdog", (3, None)),
        (b"[E1121 18:00:00.1 ProcessGroupNCCL.cpp:1] [Rank 0] Watchdog", (0, None)),
    ],
)
def test_named_within_the_line(line: bytes, expected: tuple[int | None, str | None]) -> None:
    """NCCL, syslog and c10d name the node or the rank within their lines."""
    assert named_in(line, 0) == expected
