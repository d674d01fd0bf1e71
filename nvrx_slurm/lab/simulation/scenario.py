"""The input of one run, as a value: the job, the list of acts, and the seed of all that is drawn while it runs.

A seed stands for one scenario. A scenario can be changed, which a seed cannot: with fewer acts or nodes, to find what
a broken promise needs; with other ones, to reach what no run has reached. It is written as JSON, one act a line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import msgspec

from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.lab.simulation.adversary import (
    Act,
    Swarm,
    Trait,
    draw_acts,
    draw_requests,
    draw_requeues,
    in_order,
)
from nvrx_slurm.lab.simulation.aims import draw_aim
from nvrx_slurm.lab.simulation.shapes import MOST_NODES, Shape, draw_shape, names
from nvrx_slurm.lab.simulation.situations import stage
from nvrx_slurm.util.decoding import decode

MOST_ACTS = 24


@dataclass(frozen=True, slots=True)
class Scenario:
    """`about`: one line for its reader."""

    seed: int
    shape: Shape
    acts: tuple[Act, ...]
    about: str = ""

    def with_plan(self, plan: Plan) -> Scenario:
        """The same acts against another job. Those on nodes that it does not have are done to others."""
        nodes, place = names(plan), {name: index for index, name in enumerate(self.shape.nodes)}
        acts = tuple(replace(act, node=nodes[place[act.node] % len(nodes)]) if act.node else act for act in self.acts)
        return replace(self, shape=replace(self.shape, plan=plan, nodes=nodes), acts=acts)


def chance_of(seed: int, concern: str) -> Random:
    """A seed's own chances for one concern: one that draws more does not disturb the others."""
    # A text as its seed: `Random` digests it by SHA-512, and so alike in each process.
    return Random(f"{seed}/{concern}")


def draw_scenario(seed: int, most_nodes: int | None = None) -> Scenario:
    """The scenario that a seed stands for."""
    shape = draw_shape(chance_of(seed, "shape"), most_nodes)
    acts = draw_acts(chance_of(seed, "adversary"), shape)
    asked = draw_requests(chance_of(seed, "users"), shape)
    requeues = draw_requeues(chance_of(seed, "requeues"), shape)
    shape, acts = stage(chance_of(seed, "situation"), shape, (*acts, *asked, *requeues))
    return Scenario(seed, shape, in_order(acts))


# ---- as JSON


def scenario_to_json(scenario: Scenario) -> str:
    """What `scenario_from_json` reads: small, one act a line. Fields of acts with their default are left out."""
    built: dict[str, Any] = msgspec.to_builtins(scenario)
    acts = built.pop("acts")
    for fields in (*acts, *(act["aim"] for act in acts if act["aim"])):
        for name in ("node", "lasts_s", "number", "aim", "nth", "steps", "follows"):
            if not fields.get(name, True):
                del fields[name]
    shape = ",\n".join(f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in built.pop("shape").items())
    lines = [f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}," for name, value in built.items()]
    rows = ",\n".join(f"    {json.dumps(act)}" for act in acts)
    return "\n".join(
        ["{", *lines, '  "shape": {', shape, "  },", '  "acts": [', *([rows] if rows else []), "  ]", "}", ""]
    )


def scenario_from_json(text: str | bytes) -> Scenario:
    """Raises MalformedRecord."""
    packed = text.encode() if isinstance(text, str) else text
    return decode(msgspec.json.Decoder(Scenario).decode, packed, "a scenario of the simulation")


# ---- changed


def mutate(scenario: Scenario, chance: Random) -> Scenario:
    """Another scenario that shares most with this one: one to three changes."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        scenario = chance.choice(MUTATIONS)(scenario, chance)
    return replace(scenario, about="")


def _drop_act(scenario: Scenario, chance: Random) -> Scenario:
    left = list(scenario.acts)
    if left:
        left.pop(chance.randrange(len(left)))
    return replace(scenario, acts=tuple(left))


def _add_act(scenario: Scenario, chance: Random) -> Scenario:
    """Somewhere: of a fresh adversary, which may know other kinds."""
    acts = list(scenario.acts)
    if len(acts) < MOST_ACTS:
        place = chance.randint(0, len(acts))
        at_s = acts[place - 1].at_s if place else chance.uniform(0.0, scenario.shape.work_s)
        acts.insert(place, Swarm(chance, scenario.shape).draw(chance, at_s, may_follow=place > 0))
    return replace(scenario, acts=in_order(acts))


def _change_act(scenario: Scenario, chance: Random) -> Scenario:
    """Shift one, aim it at something else, or let it last for longer or shorter."""
    acts = list(scenario.acts)
    if not acts:
        return _add_act(scenario, chance)
    place = chance.randrange(len(acts))
    act = acts[place]
    if act.traits & Trait.AT_START:
        return scenario
    match chance.randrange(4):
        case 0:
            act = replace(act, at_s=round(max(0.0, act.at_s + chance.gauss(0.0, 0.5)), 3))
        case 1:
            node = chance.choice(("", act.node)) if act.is_on_node else ""
            act = replace(act, aim=draw_aim(chance, may_follow=place > 0), node=node)
        case 2:
            act = replace(act, lasts_s=round(act.lasts_s * chance.choice((0.25, 0.5, 0.9, 1.1, 2.0)), 3))
        case _:
            act = replace(act, number=chance.randrange(1000) if act.number else 0)
            if act.node:
                act = replace(act, node=chance.choice(scenario.shape.nodes))
    acts[place] = act
    return replace(scenario, acts=in_order(acts))


def _change_size(scenario: Scenario, chance: Random) -> Scenario:
    plan = scenario.shape.plan
    role = chance.choice(plan.roles)
    nodes = max(1, role.nodes_per_replica + chance.choice((-2, -1, 1, 2)))
    changed = msgspec.structs.replace(
        role,
        nodes_per_replica=nodes,
        min_nodes=chance.choice((None, chance.randint(1, nodes))) if role.min_nodes is None else None,
    )
    spares = max(0, plan.spares + chance.choice((-1, 0, 0, 1)))
    roles = tuple(changed if each is role else each for each in plan.roles)
    plan = msgspec.structs.replace(plan, roles=roles, spares=spares)
    return scenario.with_plan(plan) if 1 <= plan.total_nodes <= MOST_NODES else scenario


def _change_bounds(scenario: Scenario, chance: Random) -> Scenario:
    """The same roles under the bounds, and with the workers, of another job."""
    other = draw_shape(chance)
    plan = msgspec.structs.replace(scenario.shape.plan, fault_tolerance=other.plan.fault_tolerance)
    shape = replace(scenario.shape, plan=plan, behaviour=other.behaviour, work_s=other.work_s)
    return replace(scenario, shape=shape)


def _change_seed(scenario: Scenario, chance: Random) -> Scenario:
    """The same acts on another network: other latencies, clocks and answers of sources."""
    return replace(scenario, seed=chance.randrange(1 << 32))


MUTATIONS: tuple[Callable[[Scenario, Random], Scenario], ...] = (
    _drop_act,
    _add_act,
    _add_act,
    _change_act,
    _change_act,
    _change_act,
    _change_size,
    _change_bounds,
    _change_seed,
)
