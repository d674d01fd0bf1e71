"""What is wrong with a flow although each of its keys is right: captures that nothing binds, an order that cannot be,
targets that the job does not have. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.lab.flow.language.events import EventPattern
from nvrx_slurm.lab.flow.language.expected import AnyOrder, Count, Expectation, Never
from nvrx_slurm.lab.flow.language.faults import FAULTS, NEEDS
from nvrx_slurm.lab.flow.language.model import Fault
from nvrx_slurm.lab.flow.language.order import impossible
from nvrx_slurm.lab.flow.language.patterns import Equals
from nvrx_slurm.lab.flow.language.problems import Problems, nearest
from nvrx_slurm.lab.flow.language.when import OnEvent, leaves
from nvrx_slurm.report.words import plural
from nvrx_slurm.util.ids import replica_id


def check_captures(problems: Problems, faults: Sequence[Fault], expect: Sequence[Expectation]) -> None:
    """Whatever a capture is compared with, something can have bound it by then."""
    _check_names(problems, faults)
    by_faults = {fault.binds for fault in faults if fault.binds is not None}
    by_triggers = {name for event in _trigger_events(faults) for name in event.binds()}
    by_expectations = {name for event in _events(expect) for name in event.binds()}
    for fault in faults:
        known = (by_faults - {fault.binds}) | by_triggers | by_expectations
        _check_known(problems, fault.captures(), known, fault.line, fault.describe())
    for event in _trigger_events(faults):
        _check_known(problems, event.captures(), by_faults | by_triggers | by_expectations, event.line, str(event))
    _check_sequence(problems, expect, by_faults | by_triggers)


def _check_names(problems: Problems, faults: Sequence[Fault]) -> None:
    first: dict[str, Fault] = {}
    for fault in faults:
        if fault.binds in first:
            other = first[fault.binds]
            problems.add_at(f"fault {other.number} (line {other.line}) binds it too", fault.line, f"${fault.binds}")
        elif fault.binds is not None:
            first[fault.binds] = fault


def _check_sequence(problems: Problems, items: Sequence[Expectation], known: set[str]) -> set[str]:
    """Returns what is bound once the items have come. Branches of `any_order` may bind for each other."""
    for item in items:
        if isinstance(item, AnyOrder):
            within = known | {name for event in _events([item]) for name in event.binds()}
            known = known.union(*(_check_sequence(problems, branch, within) for branch in item.branches))
        elif isinstance(item, (Never, Count)):
            for event in filter(None, (item.event, item.until)):
                _check_known(problems, event.captures(), known, event.line, str(item))
        else:
            known = known | set(item.event.binds())
            _check_known(problems, item.event.captures(), known, item.line, str(item))
    return known


def _check_known(problems: Problems, names: Iterable[str], known: set[str], line: int, what: str) -> None:
    for name in dict.fromkeys(names):
        if name not in known:
            near = f"; {nearest(f'${name}', [f'${other}' for other in sorted(known)])}" if known else ""
            problems.add_at(f"nothing binds it before `{what}` needs it{near}", line, f"${name}")


def check_order(problems: Problems, expect: Sequence[Expectation], plan: Plan) -> None:
    """No item can only come before one that stands ahead of it."""
    for found in impossible(expect, replicas(plan)):
        earlier = f"`{found.earlier}` (line {found.earlier.line})"
        problems.add_at(f"`{found.event}` can never come after {earlier}: {found.why}", found.event.line)


def check_job(problems: Problems, faults: Sequence[Fault], expect: Sequence[Expectation], plan: Plan) -> None:
    """Every rank, spare and replica that is named is one of the job's."""
    for fault in faults:
        for message in _bad_target(fault, plan):
            problems.add_at(message, fault.line, fault.action)
    valid = replicas(plan)
    for event in chain(_events(expect), _trigger_events(faults)):
        for name, pattern in event.fields:
            if name == "replica" and isinstance(pattern, Equals) and pattern.value not in (None, *valid):
                problems.add_at(_no_replica(pattern.value, valid), event.line, f"{event.event}.replica")


def _bad_target(fault: Fault, plan: Plan) -> Iterator[str]:
    replica, valid = fault.arguments.get("replica"), replicas(plan)
    if replica is not None and replica not in valid:
        yield _no_replica(replica, valid)
        return
    rank = fault.arguments.get("rank", fault.arguments.get("of_rank"))
    most = max(size for name, size in world_sizes(plan).items() if replica in (None, name))
    if isinstance(rank, int) and rank >= most:
        yield f"the job has no rank {rank}: its last is {most - 1}"
    if isinstance(rank, int) and replica is None and len(valid) > 1:
        yield f"which replica's rank {rank}? Name one by `replica`: {', '.join(valid)}"
    spare = fault.arguments.get("spare")
    if spare is not None and spare > plan.spares:
        yield f"the job has {plural(plan.spares, 'hot spare')}, and no number {spare}; set `overrides: {{spares: …}}`"


def check_needs(problems: Problems, faults: Sequence[Fault], has: Iterable[str]) -> None:
    """What faults need of the cluster is asked for. `has`: which of `NEEDS` are."""
    for fault in faults:
        needs = FAULTS[fault.action].needs
        if needs is not None and needs not in has:
            problems.add_at(f"needs `cluster: {{{NEEDS[needs]}}}`", fault.line, fault.action)


def replicas(plan: Plan) -> tuple[str, ...]:
    """The job's replicas, such as `main-0`."""
    return tuple(world_sizes(plan))


def world_sizes(plan: Plan) -> dict[str, int]:
    """Replica → how many ranks it has when it is whole."""
    return {
        replica_id(role.name, index): role.nodes_per_replica * role.workers_per_node
        for role in plan.roles
        for index in range(role.replicas)
    }


def _no_replica(name: object, valid: Sequence[str]) -> str:
    return f"the job has no replica {name}; {nearest(str(name), valid)}"


def _events(items: Iterable[Expectation]) -> Iterator[EventPattern]:
    """Every event that the expectations name."""
    for item in items:
        if isinstance(item, AnyOrder):
            yield from _events(chain.from_iterable(item.branches))
        else:
            yield item.event
            if isinstance(item, (Never, Count)) and item.until is not None:
                yield item.until


def _trigger_events(faults: Iterable[Fault]) -> Iterator[EventPattern]:
    for fault in faults:
        for leaf in leaves(fault.when):
            if isinstance(leaf, OnEvent):
                yield leaf.pattern
