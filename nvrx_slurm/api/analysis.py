"""`nvrx_slurm.analyze`: why a job failed, from its logs alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from os import PathLike
from pathlib import Path

from nvrx_slurm.attribution.analyze.analysis import AnalysisResult, analyze_logs, inquiry_for
from nvrx_slurm.attribution.rules.catalogue import load_catalogue
from nvrx_slurm.journal.verdicts import Attribution
from nvrx_slurm.util.clock import SystemClock

AnyPath = str | PathLike[str]


def analyze(
    paths: AnyPath | Sequence[AnyPath], *, rules: Sequence[AnyPath] = (), ranks: Collection[int] = ()
) -> Attribution:
    """What failed first, what followed, and whether a restart can help, by the rules (docs/attribution.md).

    `paths`: files and folders of logs, of any launcher, packed or not. `rules`: files of your own. `ranks`: leave out
    what other ranks say. Raises UsageError where there is nothing to read, and ConfigError for a rule that is wrong.
    """
    several = [paths] if isinstance(paths, (str, PathLike)) else paths
    return examination(
        [Path(path) for path in several], rules=[Path(rule) for rule in rules], ranks=ranks
    ).attribution


def examination(paths: Sequence[Path], *, rules: Sequence[Path] = (), ranks: Collection[int] = ()) -> AnalysisResult:
    """The same, with what could not be read. `latency_s` is the time that it took."""
    clock = SystemClock()
    began = clock.monotonic()
    found = analyze_logs(inquiry_for(paths), load_catalogue(rules), ranks=ranks)
    return found.with_latency(clock.monotonic() - began)
