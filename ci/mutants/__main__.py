"""`python -m ci.mutants` (`make ci-mutants`): do the checks see? Breaks a copy of the product, in one way at a time.

Each mutant must die by one of its unit tests or by a simulation within 500 seeds. Prints which test or promise killed
each, and exits with 1 if one survived.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ci.mutants import MUTANTS
from ci.mutants.changes import AUTO, changed_files
from ci.mutants.checks import by_flows, by_simulation, by_units
from ci.mutants.control_plane import BEYOND_SIMULATION
from ci.mutants.model import Mutant
from ci.mutants.product_copy import ProductCopy
from nvrx_slurm.util.clock import SystemClock

SEEDS, NODES, JOBS = 500, 16, 2
SAMPLE = 8


@dataclass(frozen=True, slots=True)
class Verdict:
    """What killed a mutant: a check's answer, or None if that check did not see it (or was not asked)."""

    mutant: Mutant
    by_tests: str | None
    by_simulation: str | None
    took_s: float

    @property
    def killed(self) -> bool:
        return self.by_tests is not None or self.by_simulation is not None


class Runner:
    """Judges mutants, each in one of `jobs` copies of the product."""

    def __init__(self, options: argparse.Namespace, copies: Sequence[ProductCopy]) -> None:
        self._options, self._idle = options, list(copies)
        self._lock = threading.Lock()
        self._clock = SystemClock()
        self._began = self._clock.monotonic()

    @contextmanager
    def _copy(self) -> Iterator[ProductCopy]:
        with self._lock:
            copy = self._idle.pop()
        try:
            yield copy
        finally:
            with self._lock:
                self._idle.append(copy)

    def judge(self, mutant: Mutant) -> Verdict | None:
        """Run the checks that were chosen; None: the time is up."""
        options, began = self._options, self._clock.monotonic()
        if began - self._began > options.within:
            return None
        tests = promise = None
        with self._copy() as copy, copy.broken(mutant.edits):
            if options.by in ("fast", "units"):
                tests = by_units(copy, mutant)
            elif options.by == "flows":
                tests = by_flows(copy, mutant, options.on)
            # In a full run also where a unit test has killed it: the last line says what the simulation alone sees.
            might_see = mutant.name not in BEYOND_SIMULATION or tests is None
            asked = options.by == "simulation" or (
                options.by == "fast" and might_see and not (tests and options.changed)
            )
            if mutant.simulated and asked:
                promise = by_simulation(copy, mutant.simulated, options.seeds, options.nodes)
        return Verdict(mutant, tests, promise, self._clock.monotonic() - began)


def chosen_mutants(options: argparse.Namespace) -> list[Mutant]:
    """Those that the options name."""
    return [
        mutant
        for mutant in MUTANTS
        if fnmatchcase(mutant.name, options.only)
        and (options.by != "simulation" or mutant.simulated)
        and (options.by != "flows" or mutant.flows)
    ]


def touched_by_change(mutants: Sequence[Mutant], base: str) -> list[Mutant]:
    """Those whose source or whose tests differ from `base`, and a sample where no base is known. First those whose
    source does."""
    changed = changed_files(base)
    if changed is None:
        print(f"ci.mutants: no earlier commit to compare with is known here: every {SAMPLE}th mutant is tried")
        return list(mutants[::SAMPLE])
    by_source = [mutant for mutant in mutants if any(edit.file in changed for edit in mutant.edits)]
    by_tests = [
        mutant
        for mutant in mutants
        if mutant not in by_source
        and any(name.startswith(test.partition("::")[0]) for test in mutant.tests for name in changed)
    ]
    print(f"ci.mutants: {len(by_source)} mutants of changed files, {len(by_tests)} of changed tests")
    return by_source + by_tests


def print_verdict(verdict: Verdict) -> None:
    print(f"{verdict.mutant.name:36} {verdict.took_s:6.1f} s  {verdict.mutant.promise}")
    deaths = [death for death in (verdict.by_tests, verdict.by_simulation) if death]
    for death in deaths or ["SURVIVED"]:
        print(f"{'':46}{death}", flush=True)


def main() -> int:
    """0: every mutant was killed."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m ci.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--by", default="fast", choices=("fast", "units", "simulation", "flows"), help="which checks")
    parser.add_argument("--only", metavar="GLOB", default="*", help="mutants of these names")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds of the simulation for each mutant")
    parser.add_argument("--nodes", type=int, default=NODES, help="nodes of a simulated job, at most")
    parser.add_argument("--jobs", type=int, default=JOBS, help="mutants that are judged at a time")
    parser.add_argument("--on", default="dev", choices=("local", "dev"), help="where flows run")
    parser.add_argument(
        "--changed",
        metavar="BASE",
        nargs="?",
        const=AUTO,
        help="only mutants whose source or tests have changed since this commit (by default where this branch left"
        " origin/main, or the commit before)",
    )
    parser.add_argument("--within", type=float, default=math.inf, metavar="S", help="begin no mutant after so long")
    parser.add_argument("--list", action="store_true", help="print the mutants and their promises")
    options = parser.parse_args()
    mutants = chosen_mutants(options)
    if options.changed:
        mutants = touched_by_change(mutants, options.changed)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name:32} {mutant.promise}")
        return 0
    with tempfile.TemporaryDirectory(prefix="nvrx-mutants-") as name:
        copies = [ProductCopy(Path(name) / str(number)) for number in range(min(options.jobs, len(mutants)) or 1)]
        sound = Mutant(
            "the product as it is", "", (), tuple(sorted({test for each in mutants for test in each.tests}))
        )
        # A change is judged after its tests have passed.
        if not options.changed and options.by in ("fast", "units") and (failed := by_units(copies[0], sound)):
            sys.exit(f"ci.mutants: on the product as it is this test fails: {failed}")
        for of in {mutant.simulated for mutant in mutants if mutant.simulated and options.by == "simulation"}:
            if failed := by_simulation(copies[0], of, options.seeds, options.nodes):
                sys.exit(f"ci.mutants: the product as it is: {failed}")
        runner, verdicts = Runner(options, copies), list[Verdict]()
        with ThreadPoolExecutor(options.jobs) as pool:
            for verdict in pool.map(runner.judge, mutants):
                if verdict is not None:
                    verdicts.append(verdict)
                    print_verdict(verdict)
    if len(verdicts) < len(mutants):
        print(f"{len(mutants) - len(verdicts)} more were not tried: {options.within:.0f} s had passed")
    killed = sum(verdict.killed for verdict in verdicts)
    last = f"killed {killed} of {len(verdicts)}"
    if options.by in ("fast", "simulation"):
        for of in ("job", "inprocess", "transport"):
            simulated = [verdict.by_simulation for verdict in verdicts if verdict.mutant.simulated == of]
            if simulated and not options.changed:
                alone = sum(death is not None for death in simulated)
                last += f"; simulation of {of} alone {alone} of {len(simulated)}"
    print(last)
    return int(killed < len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
