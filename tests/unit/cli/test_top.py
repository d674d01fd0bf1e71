"""How `nvrx-slurm top` reads the bytes that a terminal sends."""

from __future__ import annotations

import os
import sys

import pytest

from nvrx_slurm.cli.top import Terminal


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        ("\x1b[A\x1bOB\x1b[6~q", ["up", "down", "pagedown", "q"]),
        ("\x1b", ["esc"]),
        ("\x1bx", ["esc", "x"]),
        ("/é\r", ["/", "é", "enter"]),
        # →, delete, F5, ctrl-up, shift-left of rxvt, F1 of the Linux console and of xterm
        ("\x1b[C\x1b[3~\x1b[15~\x1b[1;5A\x1b[d\x1b[[A\x1bOPj", ["j"]),
    ],
)
def test_a_key_is_one_key(monkeypatch: pytest.MonkeyPatch, sent: str, keys: list[str]) -> None:
    """A key without a meaning does nothing: it is not read as `esc`, which leaves the page, and its letters do not
    order stacks."""
    reading, writing = os.pipe()
    os.write(writing, sent.encode())
    os.close(writing)
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert list(Terminal().keys(60.0)) == keys
