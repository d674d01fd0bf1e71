"""Runs of thousands of seeds in several processes, the report of a broken promise, and one run again."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal.records import entry_to_json
from nvrx_slurm.lab.simulation.loop import unawaited, uncollected, unlogged
from nvrx_slurm.lab.simulation.monitors import Promise
from nvrx_slurm.lab.simulation.run import RunResult, run_scenario
from nvrx_slurm.lab.simulation.scenario import Scenario, draw_scenario, scenario_from_json, scenario_to_json
from nvrx_slurm.lab.simulation.shrinking import Runner, shrink
from nvrx_slurm.util.clock import SystemClock

Say = Callable[[str], None]
SHRINK_S = 60.0
"""A failure is shrunk for so long at most before it is shown."""

SAY_EVERY_S = 5.0
CHUNK = 64
"""Seeds that are run before garbage is collected, or that a process is given at a time."""


def run_seeds(seeds: Sequence[int], nodes: int | None, jobs: int, say: Say, runner: Runner = run_scenario) -> int:
    """Run every seed; exit code 0, or 1 with a report of the first broken promise. `nodes`: of a job, at most."""
    clock = SystemClock()
    began = said = clock.monotonic()
    done = 0
    for result in _all(seeds, nodes, jobs, runner):
        done += 1
        if result.broken:
            say(f"seed {result.seed}: {result.broken}")
            show_broken(result, say, runner)
            say(f"\nthe whole run again: {replay_line(result.scenario, nodes)}")
            return 1
        if (now := clock.monotonic()) - said > SAY_EVERY_S:
            said = now
            say(f"{done:,} of {len(seeds):,} runs, {done / (now - began):.1f} a second")
    took_s = clock.monotonic() - began
    size = f" of up to {nodes} nodes" if nodes else ""
    say(f"{done:,} runs{size} in {took_s:.1f} s, {done / took_s:.1f} a second: all kept")
    return 0


def show_broken(result: RunResult, say: Say, runner: Runner = run_scenario) -> RunResult:
    """Shrink a run that broke a promise, and print it; returns the simplest one."""
    with unlogged():
        shrunk = shrink(result, SHRINK_S, runner, SystemClock())
    simple, how = shrunk.result, "" if shrunk.complete else f"; stopped after {SHRINK_S:g} s"
    say(
        f"\nwith {len(simple.acts)} of {len(result.acts)} acts and {len(simple.shape.nodes)} of"
        f" {len(result.shape.nodes)} nodes it is still broken ({shrunk.runs} runs{how}): {simple.broken}\n"
    )
    show_run(simple, say)
    say(f"\nas a file for `nvrx-slurm ci simulate --scenario FILE`:\n\n{scenario_to_json(simple.scenario)}")
    return simple


def replay_line(scenario: Scenario, nodes: int | None) -> str:
    return f"nvrx-slurm ci simulate --seed {scenario.seed}{f' --nodes {nodes}' if nodes else ''}"


def replay_seed(seed: int, nodes: int | None, say: Say) -> int:
    """Run one seed again, and print it whole."""
    return replay(draw_scenario(seed, nodes), f"seed {seed}", say)


def replay_file(path: Path, say: Say) -> int:
    """The same for the scenario of a file."""
    return replay(read_scenario(path), path.name, say)


def read_scenario(path: Path) -> Scenario:
    """Raises UsageError for a file that cannot be read, MalformedRecord for one that is no scenario."""
    try:
        return scenario_from_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def replay(scenario: Scenario, name: str, say: Say) -> int:
    """Run one scenario, and print what the adversary did, the journal, and the digest of all that happened."""
    with unlogged():
        result = run_scenario(scenario)
    show_run(result, say)
    say(f"digest {result.digest}")
    if not result.broken:
        say(f"{name}: no promise broken; exit code {result.exit_code}")
        return 0
    say(f"{name}: {result.broken}")
    return 1


def _all(seeds: Sequence[int], nodes: int | None, jobs: int, runner: Runner) -> Iterator[RunResult]:
    chunks = [(seeds[at : at + CHUNK], nodes, runner) for at in range(0, len(seeds), CHUNK)]
    if jobs == 1:
        result = map(_run_chunk, chunks)
        yield from (each for chunk in result for each in chunk)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from (each for chunk in pool.imap(_run_chunk, chunks) for each in chunk)


def _run_chunk(chunk: tuple[Sequence[int], int | None, Runner]) -> list[RunResult]:
    """Run some, and collect their garbage together: what outlives them is then not scanned each time."""
    seeds, nodes, runner = chunk
    with uncollected(), unlogged():
        results = [runner(draw_scenario(seed, nodes)) for seed in seeds]
        with unawaited() as forgotten:
            gc.collect()
        if forgotten:  # by one of these: one by one they show by which
            results = [_collected(result, runner) for result in results]
        gc.freeze()
    return results


def _collected(result: RunResult, runner: Runner) -> RunResult:
    """The same run again, broken if its garbage holds a coroutine that was never awaited."""
    again = runner(result.scenario)
    with unawaited() as forgotten:
        gc.collect()
    if again.broken or not forgotten:
        return again
    return dataclasses.replace(again, promise=Promise.SOUND, broken=f"{Promise.SOUND}: {forgotten[0]}")


def show_run(result: RunResult, say: Say) -> None:
    """The job, the acts, the journal."""
    say(f"{result.shape.cluster}, {result.shape.work_s:.1f} s of work: {result.shape.plan}\n")
    for act in result.acts:
        say(str(act))
    say("")
    for entry in result.journal:
        say(entry_to_json(entry).decode())
