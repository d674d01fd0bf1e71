"""A simpler scenario that breaks the same promise: fewer acts, then a smaller job, then rounder times.

Each step tries candidates, keeps one that still breaks the promise, and goes on from there, until none of them does
or the time is up. Acts go first, by delta debugging (Zeller and Hildebrandt, 2002): halves, quarters, single ones. A
candidate is a scenario of its own, with its own schedule, so that a smaller one may break the promise elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import msgspec

from nvrx_slurm.jobspec.model import AttributionSpec, BackoffSpec, HangSpec
from nvrx_slurm.lab.simulation.adversary import Act
from nvrx_slurm.lab.simulation.run import RunResult
from nvrx_slurm.lab.simulation.scenario import Scenario
from nvrx_slurm.util.clock import Clock

Runner = Callable[[Scenario], RunResult]


class _TimeIsUp(Exception):
    pass


class Shrinker:
    """`result` is the simplest run so far, and `runs` what it took. `complete`: no candidate that is simpler still
    breaks the promise."""

    def __init__(self, result: RunResult, within_s: float, runner: Runner, clock: Clock) -> None:
        self.result, self.runs, self.complete, self._runner, self._clock = result, 0, False, runner, clock
        self._promise, self._until = result.promise, clock.monotonic() + within_s

    @property
    def scenario(self) -> Scenario:
        return self.result.scenario

    def breaks(self, candidate: Scenario) -> bool:
        """Whether it breaks the same promise; then it is kept."""
        if candidate == self.scenario:
            return False
        if self._clock.monotonic() >= self._until:
            raise _TimeIsUp
        self.runs += 1
        result = self._runner(candidate)
        if result.promise != self._promise:
            return False
        self.result = result
        return True

    def run(self) -> None:
        before = None
        while before is not self.result:
            before = self.result
            self._drop_acts()
            self._simplify(simpler_jobs)
            self._simplify(simpler_acts)
        self.complete = True

    def _drop_acts(self) -> None:
        """ddmin, by complements: leave out one of `parts`, all of them equally large."""
        parts = 1
        while acts := self.scenario.acts:
            size = -(-len(acts) // parts)
            for at in range(0, len(acts), size):
                if self.breaks(replace(self.scenario, acts=acts[:at] + acts[at + size :])):
                    parts = max(1, parts - 1)
                    break
            else:
                if size == 1:
                    return
                parts = min(len(acts), 2 * parts)

    def _simplify(self, simpler: Callable[[Scenario], Iterator[Scenario]]) -> None:
        # From the start after each success: what was tried in vain may break the promise in the simpler scenario.
        while any(self.breaks(candidate) for candidate in simpler(self.scenario)):
            pass


def shrink(result: RunResult, within_s: float, runner: Runner, clock: Clock) -> Shrinker:
    """The simplest run that breaks the promise which `result` breaks, and that is found in time."""
    shrinker = Shrinker(result, within_s, runner, clock)
    with suppress(_TimeIsUp):
        shrinker.run()
    return shrinker


def simpler_jobs(scenario: Scenario) -> Iterator[Scenario]:
    """Fewer roles, replicas, nodes, spares and workers, and fewer mechanisms; the largest step first."""
    plan, change = scenario.shape.plan, msgspec.structs.replace
    if len(plan.roles) > 1:
        for role in plan.roles:
            yield scenario.with_plan(change(plan, roles=(role,)))
    for index, role in enumerate(plan.roles):
        simpler = [{"replicas": count} for count in smaller(role.replicas, 1)]
        for count in smaller(role.nodes_per_replica, 1):
            least = role.min_nodes
            simpler.append({"nodes_per_replica": count, "min_nodes": least and min(least, count)})  # type: ignore[dict-item]
        if role.min_nodes is not None:
            simpler.append({"min_nodes": None})  # type: ignore[dict-item]
        simpler += [{"workers_per_node": count} for count in smaller(role.workers_per_node, 1)]
        for fields in simpler:
            roles = (*plan.roles[:index], change(role, **fields), *plan.roles[index + 1 :])
            yield scenario.with_plan(change(plan, roles=roles))
    for count in smaller(plan.spares, 0):
        yield scenario.with_plan(change(plan, spares=count))
    bounds = plan.fault_tolerance
    plain = (
        change(bounds, attribution=AttributionSpec(enable_lib=False)),
        change(bounds, hang=HangSpec()),
        change(bounds, backoff=BackoffSpec(max=0.0)),
        change(bounds, teardown=change(bounds.teardown, checkpoint_signal=None, checkpoint_timeout=0.0)),
    )
    for simpler_bounds in plain:
        if simpler_bounds != bounds:
            yield scenario.with_plan(change(plan, fault_tolerance=simpler_bounds))


def simpler_acts(scenario: Scenario) -> Iterator[Scenario]:
    """Rounder times, shorter durations, and aims at the first event of their kind."""
    for index, act in enumerate(scenario.acts):
        for simpler in _simpler_act(act):
            acts = (*scenario.acts[:index], simpler, *scenario.acts[index + 1 :])
            yield replace(scenario, acts=acts)


def _simpler_act(act: Act) -> Iterator[Act]:
    for at_s in (0.0, float(round(act.at_s)), round(act.at_s, 1)):
        if len(repr(at_s)) < len(repr(act.at_s)) or (at_s == 0.0 and act.at_s):
            yield replace(act, at_s=at_s)
    for lasts_s in (float(round(act.lasts_s)), round(act.lasts_s, 1)):
        if lasts_s > 0.0 and len(repr(lasts_s)) < len(repr(act.lasts_s)):
            yield replace(act, lasts_s=lasts_s)
    if act.number and act.aim is None:
        yield replace(act, number=0)
    if act.aim is not None:
        if act.aim.steps:
            yield replace(act, aim=replace(act.aim, steps=0))
        if act.aim.nth:
            yield replace(act, aim=replace(act.aim, nth=0))
        if act.aim.follows:
            yield replace(act, aim=replace(act.aim, follows=False))


def smaller(count: int, least: int) -> Sequence[int]:
    """The least, the half, and one less."""
    return sorted({least, max(least, count // 2), max(least, count - 1)} - {count}) if count > least else ()
