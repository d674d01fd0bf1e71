"""Tracebacks of real programs, joined from their last line upwards."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.attribution.scan import Hit
from tests.unit.attribution.scan.logs import scanned

PROGRAM = """
def load(path):
    return {}[path]

def step(path):
    try:
        load(path)
    except KeyError as error:
        raise ValueError("no such part") from error

def loop():
    try:
        step("a")
    except ValueError:
        {"in": "handler"}.missing

{call}
"""


def traceback_of(tmp_path: Path, call: str) -> list[str]:
    """What Python prints of an uncaught exception."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.replace("{call}", call))
    return subprocess.run([sys.executable, script], capture_output=True, text=True, check=False).stderr.splitlines()


def hit_of(tmp_path: Path, lines: list[str], rule: str = "raised") -> Hit:
    """The last hit of a rule in these lines."""
    read = scanned(tmp_path / "a.log", "\n".join(lines).encode())
    return [hit for hit in read.hits if hit.rule.name == rule][-1]


def test_frames(tmp_path: Path) -> None:
    """The last line has the frames above it, the innermost last."""
    hit = hit_of(tmp_path, traceback_of(tmp_path, "load('a')"))
    assert hit.groups["frames"] == "train.py:17 in <module>|train.py:3 in load"


@pytest.mark.parametrize(
    ("call", "innermost"), [("step('a')", "train.py:9 in step"), ("loop()", "train.py:15 in loop")]
)
def test_chain(tmp_path: Path, call: str, innermost: str) -> None:
    """Of a chain of exceptions only the last has its frames, whether raised from or while handling another."""
    hit = hit_of(tmp_path, traceback_of(tmp_path, call))
    assert hit.groups["frames"] == f"train.py:17 in <module>|{innermost}"


def test_exception_group(tmp_path: Path) -> None:
    """An exception within a group has its own frames."""
    lines = traceback_of(
        tmp_path, "try:\n    step('a')\nexcept ValueError as e:\n    raise ExceptionGroup('all', [e])"
    )
    hit = hit_of(tmp_path, lines, "value")
    assert hit.groups["frames"] == "train.py:18 in <module>|train.py:9 in step"


def test_interleaved(tmp_path: Path) -> None:
    """Ranks that write at once, line by line, each keep their own frames."""
    printed = [traceback_of(tmp_path, "load('a')"), traceback_of(tmp_path, "step('a')")]
    at_once = itertools.chain(
        *itertools.zip_longest(*([(rank, line) for line in lines] for rank, lines in enumerate(printed)))
    )
    both = [f"[rank{each[0]}]: {each[1]}" for each in at_once if each]
    read = scanned(tmp_path / "a.log", "\n".join(both).encode())
    frames = {hit.rank: hit.groups["frames"] for hit in read.hits if hit.rule.name == "raised"}
    assert frames[0] == "train.py:17 in <module>|train.py:3 in load"
    assert frames[1] == "train.py:17 in <module>|train.py:9 in step"


def test_other_lines_between(tmp_path: Path) -> None:
    """A few lines of other writers within a traceback do not end it; another exception's frames are not taken."""
    lines = traceback_of(tmp_path, "load('a')")
    lines.insert(2, "step 17 done")
    assert "in load" in hit_of(tmp_path, lines).groups["frames"]
    assert "frames" not in hit_of(tmp_path, [*lines, "ValueError: logged alone"], "value").groups


def test_time(tmp_path: Path) -> None:
    """A traceback has the time of the line that announces it."""
    lines = ["2026-11-21T18:00:00Z ERROR it failed", *traceback_of(tmp_path, "load('a')")]
    assert hit_of(tmp_path, lines).t == 1795284000.0
    assert hit_of(tmp_path, ["2026-11-21T18:00:00Z step 1", "fine", *lines[1:]]).t is None


def test_torn(tmp_path: Path) -> None:
    """If the beginning of a traceback is lost, the frames that are left are reported."""
    assert hit_of(tmp_path, traceback_of(tmp_path, "load('a')")[3:]).groups["frames"] == "train.py:3 in load"
