"""Tracebacks, printed by real Python, of exceptions that ended no process or perhaps none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.attribution.scan import Hit
from tests.unit.attribution.scan.logs import scanned

FAILS = """
import asyncio, gc, logging, multiprocessing, sys, threading, warnings, traceback

class Shard:
    def __del__(self):
        fail()

def fail(*ignored):
    raise ValueError("no such part")

def chained():
    try:
        {}["a"]
    except KeyError as error:
        raise ValueError("no such part") from error

def joined(of):
    of.start()
    of.join()

def caught(tell):
    try:
        fail()
    except ValueError as error:
        tell(error)

async def abandoned():
    async def failing():
        fail()
    task = asyncio.create_task(failing())
    await asyncio.sleep(0)
    del task
    gc.collect()

async def called_back():
    asyncio.get_running_loop().call_soon(fail)
    await asyncio.sleep(0)

def pooled():
    with multiprocessing.Pool(1) as pool:
        pool.map(fail, [1])

logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
if __name__ == "__main__":
"""


def hit_of(tmp_path: Path, call: str, before: str = "pass") -> Hit:
    """The last hit of a ValueError in what Python prints."""
    script = tmp_path / "train.py"
    script.write_text(f"{FAILS}    {before}\n    {call}\n")
    printed = subprocess.run([sys.executable, script], capture_output=True, check=False).stderr
    return [hit for hit in scanned(tmp_path / "a.log", printed).hits if hit.rule.name == "value"][-1]


@pytest.mark.parametrize(
    ("call", "non_fatal"),
    [
        ("Shard()", "ignored"),
        ("import atexit; atexit.register(fail)", "ignored"),
        ("joined(threading.Thread(target=fail))", "thread"),
        ("joined(threading.Thread(target=chained))", "thread"),
        ("joined(threading.Thread(target=pooled))", "thread"),
        ("joined(multiprocessing.get_context('spawn').Process(target=fail))", "process"),
        ("asyncio.run(abandoned())", "task"),
        ("asyncio.run(abandoned(), debug=True)", "task"),
        ("asyncio.run(called_back())", "task"),
        ("caught(logging.exception)", "logged"),
        ("caught(lambda error: logging.warning('went on', exc_info=True))", "warned"),
        ("caught(lambda error: warnings.warn('went on: ' + traceback.format_exc()))", "ignored"),
    ],
)
def test_non_fatal(tmp_path: Path, call: str, non_fatal: str) -> None:
    """The lines above the traceback show what became of the exception."""
    hit = hit_of(tmp_path, call)
    assert hit.groups["non_fatal"] == non_fatal
    assert "in " in hit.groups["frames"]


@pytest.mark.parametrize("call", ["fail()", "chained()", "pooled()"])
def test_uncaught(tmp_path: Path, call: str) -> None:
    """An exception that ended the process is fatal, even if another process raised it first."""
    assert "non_fatal" not in hit_of(tmp_path, call).groups
    assert "non_fatal" not in hit_of(tmp_path, call, before="print('step 3:', 'loss 2.1', file=sys.stderr)").groups
    assert "non_fatal" not in hit_of(tmp_path, call, before="warnings.warn('slow')").groups


LOADER = """\
Traceback (most recent call last):
  File "/work/train.py", line 9, in <module>
    for batch in loader:
  File "/opt/venv/lib/python3.11/site-packages/torch/_utils.py", line 733, in reraise
    raise exception
ValueError: Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/work/train.py", line 4, in __getitem__
    raise ValueError("bad sample")
ValueError: bad sample
"""


@pytest.mark.parametrize(
    ("above", "non_fatal"),
    [("step 12\n", None), ("Exception in thread Thread-3 (prefetch):\n", "thread")],
)
def test_data_loader(tmp_path: Path, above: str, non_fatal: str | None) -> None:
    """The main process raises an exception of a data loader's worker again: the first one counts as the second
    does."""
    hits = scanned(tmp_path / "a.log", (above + LOADER).encode()).hits
    assert {hit.groups.get("non_fatal") for hit in hits} == {non_fatal}


def test_without_traceback(tmp_path: Path) -> None:
    """Python reports some exceptions that it ignores in two lines."""
    printed = b"Exception ignored in: <_io.TextIOWrapper name='<stdout>'>\nBrokenPipeError: [Errno 32] Broken pipe\n"
    assert scanned(tmp_path / "a.log", printed).hits[0].groups == {"non_fatal": "ignored"}
    printed = b"Exception ignored in: <function F.__del__>\nfine\nValueError: y\n"
    assert scanned(tmp_path / "a.log", printed).hits[0].groups == {}
