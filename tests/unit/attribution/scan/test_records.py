"""A log line that is a JSON object is read as the text that it contains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nvrx_slurm.attribution.rules.catalogue import load_catalogue
from nvrx_slurm.attribution.scan import find_logs, scan
from nvrx_slurm.attribution.scan.records import said_by, unwrapped

HEADER = 'Traceback (most recent call last):\n  File "/w/train.py", line 40, in main\n'
TRACEBACK = f"{HEADER}KeyError: 'labels'"


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            {"asctime": "2026-11-29 03:00:00,123", "levelname": "ERROR", "message": "failed", "exc_info": TRACEBACK},
            f"2026-11-29 03:00:00,123 ERROR failed\n{TRACEBACK}",
        ),
        (
            {"ts": 1795283000.5, "level": "error", "event": "failed", "rank": 3, "exception": "KeyError: 'labels'\n"},
            "[rank3]: 1795283000.5 ERROR failed\n[rank3]: KeyError: 'labels'",
        ),
        ({"msg": "progress", "step": 12, "loss": 2.5, "tags": ["a"]}, "progress; step=12 loss=2.5"),
        (
            {"text": "12:00 | ERROR | m:f:1 - x\nKeyError: 'a'\n", "record": {}},
            "12:00 | ERROR | m:f:1 - x\nKeyError: 'a'",
        ),
        (
            {"log": "KeyError: 'a'\n", "stream": "stderr", "time": "2026-11-29T03:00:00.123456789Z"},
            "2026-11-29T03:00:00.123456789Z stderr F KeyError: 'a'",
        ),
        ({"step": 12, "loss": 2.5}, None),
        ({"message": {"message": "KeyError"}}, None),
    ],
)
def test_said(record: dict[str, object], said: str | None) -> None:
    """A record's time, level, message and plain values are in its first line, and its exception is in lines of its
    own. An object without a message is no record."""
    assert said_by(json.dumps(record).encode()) == (said and said.encode())


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b'{"msg": "torn\\n',
        b'{"msg": "\xff\\n"}',
        b'{"msg": "\\n", "x": ' + b"[" * 20_000,
        b"{'msg': 'a dict of Python\\n'}",
        b' {"msg": "indented\\n"}',
        b'{"level": "info", "msg": "of one line"}',
    ],
)
def test_other_lines_stay(line: bytes) -> None:
    """A line that is not just a JSON object stays as it is, and so does a record of one line without an error."""
    assert unwrapped(b"x\n" + line + b"\n") == (b"x\n" + line + b"\n", None)


def test_places() -> None:
    """Every line of a record begins where the record does, and each line's end is known."""
    record = b'{"msg": "a", "exc_info": "b\\nc"}'
    text, begins = unwrapped(b"x\n" + record + b"\r\ny\n")
    assert text == b"x\na\nb\nc\r\ny\n"
    after = 2 + len(record)
    assert begins == [2, 2, 2, after + 1, after + 2, after + 4]


def test_an_exception_in_a_record(tmp_path: Path) -> None:
    """The hit has the record's line and rank and the traceback's frame; it is marked as logged, since the process may
    have gone on."""
    path = tmp_path / "train.log"
    records = [
        {"time": "2026-11-29T03:00:00Z", "level": "INFO", "rank": 5, "message": "step 1"},
        {"time": "2026-11-29T03:00:02Z", "level": "ERROR", "rank": 5, "message": "failed", "exc_info": TRACEBACK},
        {"time": "2026-11-29T03:00:03Z", "level": "INFO", "rank": 5, "message": "bye"},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = scan(find_logs([path], None), load_catalogue())
    (hit,) = [hit for hit in result.hits if hit.rule.fault == "key_error"]
    assert (hit.line, hit.rank, hit.text) == (2, 5, "[rank5]: KeyError: 'labels'")
    assert hit.offset == path.read_bytes().index(b"\n") + 1
    assert (hit.groups["frames"], hit.groups["non_fatal"]) == ("train.py:40 in main", "logged")


@pytest.mark.parametrize(
    "prefix",
    [
        "ERROR:train:",
        "ERROR: ",
        "2026-11-29 03:00:02 | ERROR | ",
        "2026-11-29 03:00:02.123 | ERROR    | __main__:main:12 - ",
        "2026-11-29 03:00:02,123 - train - ERROR - ",
        "[2026-11-29 03:00:02,123][src.train][ERROR] - ",
        "[2026-11-29 03:00:02,123][ERROR] ",
        "[rank3]: 2026-11-29T03:00:02Z CRITICAL ",
    ],
)
def test_an_exception_that_a_logger_reports(tmp_path: Path, prefix: str) -> None:
    """The exception is recognised behind the prefixes of usual formats, names no node, and is marked as logged."""
    path = tmp_path / "train.log"
    path.write_text(f"starting\n{prefix}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    result = scan(find_logs([path], None), load_catalogue())
    (hit,) = [hit for hit in result.hits if hit.rule.fault == "cuda_oom"]
    assert (hit.node, hit.groups.get("non_fatal")) == (None, "logged")
