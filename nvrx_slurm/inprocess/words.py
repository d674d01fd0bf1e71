"""An error in words that any record can carry: bounded, since all ranks read them, and such that JSON takes them."""

from __future__ import annotations

import traceback

TEXT_CHARS = 2000
STACK_CHARS = 4000
"""How much of a stack goes into a record: its end."""


def in_words(error: BaseException) -> str:
    """One line: what kind, and what it says."""
    line = "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")
    return clean(line if len(line) <= TEXT_CHARS else f"{line[:TEXT_CHARS]} …")


def place_of(error: BaseException) -> str:
    """Where it was raised; the whole stack is in the record."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else "nowhere in Python"


def stack_of(error: BaseException) -> str:
    """Where it was raised, and what led to it."""
    return clean("".join(traceback.format_exception(error))[-STACK_CHARS:])


def clean(text: str) -> str:
    """Such that JSON can carry it: a lone surrogate, of an undecodable path, cannot be encoded."""
    return text.encode(errors="backslashreplace").decode()
