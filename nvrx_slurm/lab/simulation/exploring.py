"""Runs for so many minutes, guided by coverage: what reaches something new is kept, and changed for further runs.

Something new is a line or a branch of the product's decision-making code, or a pair of journal events that no run has
had one after the other. The scenarios kept are the corpus: files of a folder, each one with what it was the first to
reach. A new run takes a fresh seed, or changes one of them.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import pkgutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from random import Random
from types import CodeType, FunctionType
from typing import Any

from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal.records import Entry
from nvrx_slurm.lab.simulation.loop import uncollected, unlogged
from nvrx_slurm.lab.simulation.many_seeds import Say, run_and_collect
from nvrx_slurm.lab.simulation.run import RunResult, run_scenario
from nvrx_slurm.lab.simulation.scenario import Scenario, draw_scenario, mutate, scenario_to_json
from nvrx_slurm.lab.simulation.seeds import read_scenario, show_broken
from nvrx_slurm.util.clock import SystemClock

# Of one task of a process, between two looks at the clock and the corpus.
RUNS = 32

# This share of the runs has a seed of its own.
FRESH = 0.4

PARENTS = 16
SAY_EVERY_S = 30.0


PACKAGES = ("nvrx_slurm.core", "nvrx_slurm.controller", "nvrx_slurm.agent")
# Of the six ids of tools: the one that no debugger, profiler or coverage tool takes by convention.
TOOL = 4

_monitoring: Any = getattr(sys, "monitoring", None)
# Python 3.11 has no `sys.monitoring`: nothing is measured there.
HAS_MONITORING = _monitoring is not None


class Coverage:
    """Places of `PACKAGES` that this process has executed: `core/job.py:120`, or `core/job.py:120 3>7` for one way of
    a branch. One a process."""

    def __init__(self) -> None:
        self.lines: set[str] = set()  # all that there are
        self._new: list[str] = []
        self._ways: dict[tuple[CodeType, int], int] = {}
        events = _monitoring.events
        _monitoring.use_tool_id(TOOL, "nvrx-slurm simulation")
        _monitoring.register_callback(TOOL, events.LINE, self._line)
        _monitoring.register_callback(TOOL, events.BRANCH, self._branch)
        for code in _codes():
            self.lines.update(f"{_path(code)}:{line}" for _, _, line in code.co_lines() if line)
            _monitoring.set_local_events(TOOL, code, events.LINE | events.BRANCH)

    def take_new(self) -> list[str]:
        """The places reached for the first time since the last call."""
        new, self._new = self._new, []
        return new

    def close(self) -> None:
        _monitoring.free_tool_id(TOOL)

    def _line(self, code: CodeType, line: int) -> Any:
        self._new.append(f"{_path(code)}:{line}")
        # Once is enough: after some hundred runs hardly an event is left, and runs are as fast as without coverage.
        return _monitoring.DISABLE

    def _branch(self, code: CodeType, at: int, to: int) -> Any:
        before = self._ways.get((code, at))
        if before == to:
            return None
        self._ways[code, at] = to
        line = next((line for begin, end, line in code.co_lines() if begin <= at < end), None)
        self._new.append(f"{_path(code)}:{line} {at}>{to}")
        return None if before is None else _monitoring.DISABLE  # the other way may still be taken


def _path(code: CodeType) -> str:
    return code.co_filename.rpartition("nvrx_slurm/")[2]


def _codes() -> Iterator[CodeType]:
    """Of every function of the packages, those inside others included."""
    for package in PACKAGES:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    # From the collector: what a decorator has wrapped, or a class holds, has no name in its module.
    found = [
        each.__code__
        for each in gc.get_objects()
        if isinstance(each, FunctionType) and str(each.__module__).startswith(PACKAGES)
    ]
    seen: set[CodeType] = set()
    while found:
        code = found.pop()
        if code not in seen and "nvrx_slurm/" in code.co_filename:
            seen.add(code)
            yield code
            found += [each for each in code.co_consts if isinstance(each, CodeType)]


@dataclass(slots=True)
class Explored:
    """What some runs have found: scenarios with the places that they reached first in that process."""

    runs: int
    new: list[tuple[Scenario, list[str]]] = field(default_factory=list)
    broken: list[RunResult] = field(default_factory=list)


_measured: Coverage | None = None
_known: set[str] = set()


def _begin() -> None:
    """In each process, first."""
    global _measured
    _measured = Coverage() if HAS_MONITORING else None


def _explore(scenarios: Sequence[Scenario]) -> Explored:
    explored = Explored(runs=len(scenarios))
    with uncollected(), unlogged():
        for scenario in scenarios:
            result = run_and_collect(run_scenario, scenario)
            if result.broken:
                explored.broken.append(result)
            if _measured is not None:
                reached = [*_measured.take_new(), *pairs(result.journal)]
                new = [place for place in reached if place not in _known]
                _known.update(new)
                if new and not result.broken:
                    explored.new.append((scenario, new))
    return explored


def _scenario(seed: int, nodes: int | None, parents: Sequence[Scenario]) -> Scenario:
    """The seed's own, or a change of one of the parents by it. Without parents each is fresh."""
    chance = Random(f"{seed}/exploring")
    if not parents or chance.random() < FRESH:
        return draw_scenario(seed, nodes)
    return mutate(chance.choice(parents), chance)


def pairs(journal: Sequence[Entry]) -> set[str]:
    """What follows what in a journal: a control plane's branches are in its order of events as well."""
    tags = [str(entry.record.__struct_config__.tag) for entry in journal]
    return {f"{one} → {other}" for one, other in pairwise(tags)}


class Corpus:
    """The scenarios kept, and all that they have reached. New ones are written into `keep`."""

    def __init__(self, folders: Sequence[Path], keep: Path | None) -> None:
        self.keep, self.reached, self.added = keep, set[str](), 0
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
        files = [file for folder in (*folders, *([keep] if keep else [])) for file in sorted(folder.glob("*.json"))]
        self.scenarios = [read_scenario(file) for file in files if not file.name.startswith("broken-")]

    def take(self, scenario: Scenario, reached: Sequence[str]) -> None:
        """Keep it if no other process was there before."""
        new = [place for place in reached if place not in self.reached]
        self.reached.update(new)
        if new and scenario not in self.scenarios:
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            scenario = replace(scenario, about=f"the first to reach {new[0]}{more}")
            self.scenarios.append(scenario)
            self.added += 1
            self.write(scenario)

    def write(self, scenario: Scenario, prefix: str = "") -> Path | None:
        """Its file, which is named by its content."""
        if self.keep is None:
            return None
        text = scenario_to_json(scenario)
        file = self.keep / f"{prefix}{hashlib.sha256(text.encode()).hexdigest()[:10]}.json"
        file.write_text(text)
        return file


def explore(
    minutes: float, first: int, nodes: int | None, jobs: int, folders: Sequence[Path], keep: Path | None, say: Say
) -> int:
    """Run for so long in so many processes; exit code 1 if a promise was broken."""
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder of scenarios")
    if not HAS_MONITORING:
        say("guidance by coverage needs Python 3.12 or newer: these runs have fresh seeds, and changes of the corpus")
    clock, chance, corpus = SystemClock(), Random(first), Corpus(folders, keep)
    began = said = clock.monotonic()
    runs, next_seed, broken = 0, first, Counter[str]()
    known = len(corpus.scenarios)

    def tasks() -> Iterator[list[Scenario]]:
        nonlocal next_seed
        for at in range(0, known, RUNS):
            yield corpus.scenarios[at : at + RUNS]
        while clock.monotonic() - began < 60.0 * minutes:
            # Half of the parents are of the newest: what was reached last is best understood around there.
            newest = corpus.scenarios[-PARENTS // 2 :]
            parents = (*newest, *chance.sample(corpus.scenarios, min(PARENTS // 2, len(corpus.scenarios))))
            yield [_scenario(seed, nodes, parents) for seed in range(next_seed, next_seed + RUNS)]
            next_seed += RUNS

    def report() -> str:
        took_s = clock.monotonic() - began
        reached = (
            f", {len(corpus.reached):,} places reached, {corpus.added} new in the corpus" if HAS_MONITORING else ""
        )
        return f"{runs:,} runs in {took_s:.0f} s, {runs / took_s:.1f} a second{reached}, {broken.total()} broken"

    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_begin)
    left = tasks()
    with pool:
        going: set[Future[Explored]] = set()
        while True:
            while len(going) < jobs and (task := next(left, None)) is not None:
                going.add(pool.submit(_explore, task))
            if not going:
                break
            done, going = wait(going, return_when=FIRST_COMPLETED)
            for each in done:
                explored = each.result()
                runs += explored.runs
                for scenario, reached in explored.new:
                    corpus.take(scenario, reached)
                for result in explored.broken:
                    assert result.promise is not None
                    broken[result.promise] += 1
                    say(f"broken: {result.broken}")
                    # The first one of each promise is shrunk and shown; the others are likely to have the same cause.
                    simple = show_broken(result, say) if broken[result.promise] == 1 else result
                    corpus.write(replace(simple.scenario, about=str(simple.broken).partition("\n")[0]), "broken-")
            if clock.monotonic() - said > SAY_EVERY_S:
                said = clock.monotonic()
                say(report())
    say(report())
    if HAS_MONITORING:
        measured = Coverage()
        for package in PACKAGES:
            name = package.rpartition(".")[2] + "/"
            there = {line for line in measured.lines if line.startswith(name)}
            say(f"{name}: {len(there & corpus.reached):,} of {len(there):,} lines")
        measured.close()
    return 1 if broken else 0
