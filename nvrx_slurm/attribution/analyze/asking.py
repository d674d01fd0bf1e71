"""The question that a person asks of files alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nvrx_slurm.journal.verdicts import FailureKey, Inquiry


def inquiry_for(paths: Sequence[Path]) -> Inquiry:
    """An inquiry about logs of which nothing is known: no exit code, no node, no earlier cycle."""
    absolute = tuple(str(path.absolute()) for path in paths)
    return Inquiry(key=FailureKey(job="", generation=0, replica="", cycle=0), paths=absolute)
