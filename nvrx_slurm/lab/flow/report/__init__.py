"""The outcome of a suite as text for a terminal, JUnit XML, GitHub, and an HTML page.

Each module turns a `SuiteOutcome` into text and touches nothing; `write` alone writes.
"""

from __future__ import annotations

from pathlib import Path


def write(path: Path, text: str) -> None:
    """Write a report, folders above it included. What is no Unicode text is written as an escape. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
