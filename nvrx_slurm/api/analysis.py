"""`nvrx_slurm.analyze`: why a job failed, from its logs alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from os import PathLike
from pathlib import Path

from nvrx_slurm.attribution.analyze.analysis import CYCLE, AnalysisResult, analyze_logs, inquiry_about, inquiry_for
from nvrx_slurm.attribution.rules.catalogue import load_catalogue
from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal.verdicts import Attribution, FailureKey, Inquiry
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
    return _timed(lambda: inquiry_for(paths), rules, ranks)


def _timed(inquiry: Callable[[], Inquiry], rules: Sequence[Path], ranks: Collection[int]) -> AnalysisResult:
    clock = SystemClock()
    began = clock.monotonic()
    found = analyze_logs(inquiry(), load_catalogue(rules), ranks=ranks)
    return found.with_latency(clock.monotonic() - began)


def examine_cycles(
    paths: Sequence[Path], last: int, *, rules: Sequence[Path] = (), ranks: Collection[int] = ()
) -> list[AnalysisResult]:
    """The same of the last cycles whose logs lie below these folders, each on its own, oldest first. Raises
    UsageError where there are none."""
    # A set: one of the paths may lie below another one, and a cycle is examined once.
    folders = {folder for path in paths for folder in path.absolute().rglob("cycle-*")}
    found = [(folder, named) for folder in folders if (named := CYCLE.search(str(folder)))]
    if not found:
        raise UsageError(f"no cycle's folder below {', '.join(map(str, paths))}: --last takes the folder of a job")
    ordered = sorted(
        (int(named["generation"]), int(named["cycle"]), named["replica"], folder) for folder, named in found
    )
    results = []
    for *_, folder in ordered[-last:]:
        job = next((str(above) for above in folder.parents if (above / "plan.json").is_file()), "")
        now = Inquiry(key=FailureKey(job=job, generation=0, replica="", cycle=0), paths=())
        results.append(_timed(partial(inquiry_about, folder, now), rules, ranks))
    return results
