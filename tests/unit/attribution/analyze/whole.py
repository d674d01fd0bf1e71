"""Whole logs, analyzed as `nvrx-slurm analyze` does it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvrx_slurm.attribution.analyze.analysis import analyze_logs
from nvrx_slurm.attribution.rules.catalogue import load_catalogue
from nvrx_slurm.journal.verdicts import Attribution, FailureKey, Inquiry

CATALOGUE = load_catalogue()
STEPS = "".join(f"step {step} loss 2.{step:03} grad_norm 0.8\n" for step in range(100, 200))
HEAD = 'Traceback (most recent call last):\n  File "/work/train.py", line 31, in main\n    run()\n'


def answer(folder: Path, logs: str | Mapping[str, str], **facts: Any) -> Attribution:
    """The attribution of these files, or of one."""
    for name, text in ({"slurm-7.out": logs} if isinstance(logs, str) else logs).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    key = FailureKey(job="", generation=0, replica="main-0", cycle=0)
    return analyze_logs(Inquiry(key=key, paths=(str(folder),), **facts), CATALOGUE).attribution


def said(attribution: Attribution) -> tuple[str, str, str | None]:
    """Verdict, class and the line of the cause."""
    line = attribution.primary
    return attribution.verdict.value, attribution.fault, line and line.text
