"""Waiting for words in a log that grows."""

from __future__ import annotations

import subprocess
from pathlib import Path

WAIT_S = 45.0
"""The timeout for words that must appear. They take milliseconds, unless the machine is busy with other tests."""


def until_logged(log: Path, words: str) -> None:
    """Return once the log contains these words. The log need not exist yet."""
    command = ["timeout", str(WAIT_S), "tail", "-n", "+1", "-s", "0.02", "-F", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as tail:
        assert tail.stdout is not None
        found = any(words in line for line in tail.stdout)
        tail.terminate()
    assert found, f"{words!r} did not come in {WAIT_S:.0f} s: {log.read_text()[-3000:]}"
