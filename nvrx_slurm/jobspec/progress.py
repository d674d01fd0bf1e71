"""The keys below `fault_tolerance.progress`: when a job that fails again and again counts as stuck."""

from __future__ import annotations

import re
import warnings
from typing import Annotated

from pydantic import AfterValidator

from nvrx_slurm.jobspec.block import Block
from nvrx_slurm.jobspec.values import Line, Positive


def _one_group(text: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # what it means may change: better to say it now
            groups = re.compile(text.encode()).groups  # logs are bytes
    except (re.error, OverflowError, RecursionError, FutureWarning) as error:
        raise ValueError(f"is no regular expression: {error}") from None
    if groups != 1:
        raise ValueError(f"must have one group, around the step, not {groups}: such as 'iteration +([0-9]+)/'")
    return text


StepPattern = Annotated[Line, AfterValidator(_one_group)]


class Progress(Block):
    """When a job that fails again and again counts as stuck, and ends with 93.

    How far a cycle has come is told by `workload.beat(step=…)`, and where that is not called, by a file or the logs;
    of several the furthest counts.
    """

    max_no_progress_cycles: Positive | None = None
    """After so many cycles in a row with too few steps the job ends. Not set: it never counts as stuck."""
    min_progress_steps: Positive = 1
    """With fewer steps than this a cycle has made no progress."""
    iteration_file: Line | None = None
    """A file that holds the last saved step, such as Megatron's `latest_checkpointed_iteration.txt`; relative to the
    folder of job.yaml."""
    log_pattern: StepPattern | None = None
    """A regular expression with one group, the step, such as `iteration +([0-9]+)/`. Its last match in what a rank
    has printed counts."""
