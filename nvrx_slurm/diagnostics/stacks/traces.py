"""Reads the stacks that faulthandler and py-spy print: pure, text to value.

Each thread is a block. In faulthandler's the newest comes first, so that the main thread's is the last:

    Thread 0x00007f6eba101700 (most recent call first):
      File "/home/me/loader.py", line 7 in fetch

    Current thread 0x00007f6eba0f1740 (most recent call first):
      File "/home/me/train.py", line 41 in step

py-spy gives the main thread the process's number, and names it where it can:

    Process 4711: python train.py

    Thread 4711 (idle): "MainThread"
        step (train.py:41)
"""

from __future__ import annotations

import re

_HEADER = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_SPIED_PROCESS = re.compile(r"^Process (\d+):")
_SPIED_HEADER = re.compile(r"^Thread \S+ \(.*\)")
_SPIED_FRAME = re.compile(r"^    (?P<function>.+) \((?P<file>[^():]*(?:\.pyx?|>)):(?P<line>\d+)\)$")
_CUT_SHORT = "..."


def innermost_frame(text: str) -> str | None:
    """Where the main thread is, such as `train.py:41 in step`; None if it runs no Python, or its stack is not there.

    Of two kinds of stacks py-spy's, which come second, count for more: then the first kind was not whole.
    """
    lines = text.splitlines()
    return _innermost(_SPIED_FRAME, _spied_main_block(lines)) or _innermost(_FRAME, _main_block(lines))


def lacks_threads(text: str) -> bool:
    """Whether faulthandler has left the oldest threads out, the main one first: it prints the 100 newest."""
    return _CUT_SHORT in text.splitlines()


def _main_block(lines: list[str]) -> list[str]:
    blocks = _blocks(lines, _HEADER)
    return [] if not blocks or _CUT_SHORT in blocks[-1] else blocks[-1]


def _spied_main_block(lines: list[str]) -> list[str]:
    pid = next((found[1] for line in lines if (found := _SPIED_PROCESS.match(line))), None)
    blocks = _blocks(lines, _SPIED_HEADER)
    return next((block for block in blocks if block[0].startswith(f"Thread {pid} ") or _names_main(block)), [])


def _names_main(block: list[str]) -> bool:
    return block[0].endswith('"MainThread"')


def _blocks(lines: list[str], header: re.Pattern[str]) -> list[list[str]]:
    blocks: list[list[str]] = []
    for line in lines:
        if header.match(line):
            blocks.append([line])
        elif blocks:
            blocks[-1].append(line)
    return blocks


def _innermost(pattern: re.Pattern[str], block: list[str]) -> str | None:
    frame = next((frame for line in block if (frame := pattern.match(line))), None)
    if frame is None:
        return None
    return f"{frame['file'].rpartition('/')[2]}:{frame['line']} in {frame['function']}"
