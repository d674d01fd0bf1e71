"""A log that every source of attribution must read in the same way."""

from __future__ import annotations

from pathlib import Path

RANK = 1


def write_failure(folder: Path) -> None:
    """Write the log of a worker that cannot import a module, and will fail again for that reason."""
    folder.mkdir(exist_ok=True)
    (folder / f"rank-{RANK}.err").write_text(
        "Traceback (most recent call last):\n"
        '  File "/w/train.py", line 12, in main\n'
        "    import foo\n"
        "ModuleNotFoundError: No module named 'foo'\n"
    )
