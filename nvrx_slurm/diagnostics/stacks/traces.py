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
    pid = next((found[1] for line in lines if (found := _SPIED_PROCESS.match(line))), None)
    main = (f"Thread {pid} ", '"MainThread"')
    spied = (
        each for each in _blocks(lines, _SPIED_HEADER) if each[0].startswith(main[0]) or each[0].endswith(main[1])
    )
    if frame := _innermost(_SPIED_FRAME, next(spied, [])):
        return frame
    # faulthandler prints the main thread last; where it has cut its list short, the main thread is missing.
    blocks = _blocks(lines, _HEADER)
    return None if not blocks or _CUT_SHORT in blocks[-1] else _innermost(_FRAME, blocks[-1])


def lacks_threads(text: str) -> bool:
    """Whether faulthandler has left the oldest threads out, the main one first: it prints the 100 newest."""
    return _CUT_SHORT in text.splitlines()


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
