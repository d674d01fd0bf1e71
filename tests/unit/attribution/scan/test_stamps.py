"""Time stamps of many forms."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from nvrx_slurm.attribution.scan.prefixes import first_stamp, stamp_of

NOON = datetime(2026, 11, 21, 12, 0, 0).timestamp()
"""By this machine's clock: what a stamp without a zone means."""

NOON_UTC = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC).timestamp()
CHANGED_AT = NOON + 3600


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"2026-11-21T12:00:00.250000Z kernel: x", NOON_UTC + 0.25),
        (b"2026-11-21T14:00:00+02:00 x", NOON_UTC),
        (b"2026-11-21T07:00:00-0500 x", NOON_UTC),
        (b"2026-11-21 12:00:00,123 - INFO - x", NOON + 0.123),
        (b"[2026-11-21 12:00:00] iteration 10/ 100 |", NOON),
        (b"[NeMo W 2026-11-21 12:00:00 nemo_logging:349] x", NOON),
        (b"2026/11/21 12:00:00 x", NOON),
        (b"slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T12:00:00 DUE TO TIME LIMIT ***", NOON),
        (b"I1121 12:00:00.123456 140 a.py:12] x", NOON + 0.123456),
        (b"[rank0]:[E1121 12:00:00.5 ProcessGroupNCCL.cpp:563] x", NOON + 0.5),
        (b"W20261121 12:00:00.5 12 a.cc:1] x", NOON + 0.5),
        (b"Nov 21 12:00:00 node17 kernel: x", NOON),
        (b"[Sat Nov 21 12:00:00 2026] NVRM: Xid", NOON),
        (b"11/21/2026 12:00:00 - INFO - x", NOON),
        (b"[11/21/26 12:00:00] INFO x", NOON),
        (b'{"ts": 1795262400.5, "msg": "x"}', 1795262400.5),
        (b"1795262400123 x", 1795262400.123),
        (b"[12345.678901] NVRM: Xid", None),
        (b" iteration 10/ 100 | elapsed time per iteration (ms): 12.3 |", None),
        (b"2026-13-41 12:00:00 x", None),
        (b"x" * 300 + b"2026-11-21 12:00:00", None),
    ],
)
def test_forms(line: bytes, expected: float | None) -> None:
    """Each usual form is read as a time, and any other text is no stamp."""
    stamp = stamp_of(line, CHANGED_AT)
    assert stamp == (expected if expected is None else pytest.approx(expected, abs=1e-6))


def test_year() -> None:
    """A stamp without a year is in the latest year in which it is not after the file's last change."""
    in_january = datetime(2027, 1, 2).timestamp()
    assert stamp_of(b"Dec 31 23:00:00 n1 x: y", in_january) == datetime(2026, 12, 31, 23).timestamp()
    assert stamp_of(b"Jan  1 23:00:00 n1 x: y", in_january) == datetime(2027, 1, 1, 23).timestamp()


def test_first() -> None:
    """Several lines have the time of the first one with a stamp."""
    assert first_stamp([b"x", b"2026-11-21T12:00:00Z", b"2026-11-21T13:00:00Z"], CHANGED_AT) == NOON_UTC
    assert first_stamp([b"x"], CHANGED_AT) is None
