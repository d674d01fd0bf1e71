"""Flows and job files as YAML for people: an event or a fault a line, with the comments that belong to it; and the
job.yaml of a plan, for a job whose own is not at hand."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from nvrx_slurm.jobspec.model import FaultToleranceSpec
from nvrx_slurm.jobspec.plan import PLAIN_ROLE, Plan
from nvrx_slurm.jobspec.reading import written
from nvrx_slurm.util.durations import words

# A mapping of a flow file: a fault, an expectation, what stands below them.
Item = dict[str, Any]

# The key of a mapping under which its comment stands: text, a line of it a line of comment above the mapping.
NOTE = "#"

WIDTH = 100
_PLAIN = re.compile(r"[A-Za-z0-9$/.](?:[\w$/.~+=@%' -]*[\w$/.~+=@%-])?")
_NOTHING = re.compile(r"null", re.IGNORECASE)


def to_yaml(document: Mapping[str, Any]) -> str:
    """A document of mappings, lists, text and numbers, which `config.yamlfile.read_yaml` gives back as text.

    A mapping or a list that fits into a line stands in one, unless a mapping in it has a comment, or a list in it
    holds mappings.
    """
    return "".join(f"{line}\n" for line in _mapping(document, ""))


def _mapping(value: Mapping[str, Any], indent: str) -> Iterator[str]:
    yield from _note(value, indent)
    for key, below in value.items():
        if key == NOTE:
            continue
        head = f"{indent}{_scalar(key)}:"
        if _is_short(below, len(head)):
            yield f"{head} {inline(below)}".rstrip()
            continue
        yield head
        yield from _below(below, indent + "  ")


def _below(value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from _mapping(value, indent)
        return
    for item in value:
        if isinstance(item, Mapping):
            yield from _note(item, indent)
            item = {key: below for key, below in item.items() if key != NOTE}
        # An item of a list reads best on one line, unless it says one thing after the other.
        if (
            not isinstance(item, Mapping) or not any(isinstance(value, Mapping) for value in item.values())
        ) and _is_short(item, len(indent)):
            yield f"{indent}- {inline(item)}"
        else:
            first, *rest = _below(item, indent + "  ")
            yield f"{indent}- {first.lstrip()}"
            yield from rest


def _note(value: Mapping[str, Any], indent: str) -> Iterator[str]:
    for line in value.get(NOTE, "").splitlines():
        yield from (f"{indent}# {part}" for part in textwrap.wrap(line, WIDTH - len(indent)))


def _is_short(value: Any, used: int) -> bool:
    is_nested = isinstance(value, Mapping) or (isinstance(value, Sequence) and not isinstance(value, str))
    return not is_nested or (not _has_lines(value) and used + len(inline(value)) < WIDTH)


def _has_lines(value: Any) -> bool:
    """Whether something in it deserves a line of its own."""
    if isinstance(value, Mapping):
        return NOTE in value or any(map(_has_lines, value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return any(isinstance(item, Mapping) or _has_lines(item) for item in value)
    return False


def inline(value: Any) -> str:
    """The value in YAML's flow style, on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(key)}: {inline(below)}" for key, below in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(inline, value)) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    """Plain where it reads back as itself, else quoted as in JSON, which YAML takes too."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    plain = _PLAIN.fullmatch(text) and not _NOTHING.fullmatch(text)
    return text if plain else json.dumps(text, ensure_ascii=False)


NICE_S = (1, 2, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 900, 1200, 1800, 3600)


def in_any_order(branches: list[list[Item]]) -> list[Item]:
    """Branches side by side; one alone needs no word."""
    if len(branches) <= 1:
        return branches[0] if branches else []
    return [{"any_order": [branch[0] if len(branch) == 1 else branch for branch in branches]}]


def without_never(items: Iterable[Any]) -> Iterator[Any]:
    """The items of a job that has no end: without an end a `never` is never met."""
    for item in items:
        if isinstance(item, list):
            yield list(without_never(item))
        elif "any_order" in item:
            yield {"any_order": list(without_never(item["any_order"]))}
        elif "never" not in item:
            yield item


def nice(seconds: float) -> float:
    """The next longer duration that people would write."""
    return next((nice_s for nice_s in NICE_S if nice_s >= seconds), math.ceil(seconds / 3600) * 3600)


# ------------------------------------------------------------ a plan as job.yaml


def job_yaml(plan: Plan, note: str) -> str:
    """A job.yaml that makes this plan, in any folder, without keys at their default. `note`: the comment at its head.

    What a plan does not hold is not in it: the keys below `slurm` (the time limit aside) and `setup`.
    """
    document = {NOTE: note, "name": plan.name, **_work(plan, complete=False), "workdir": plan.workdir}
    if plan.time_limit_s is not None:
        document["slurm"] = {"time": words(plan.time_limit_s)}
    if store := msgspec.to_builtins(plan.store):
        document["store"] = store
    if bounds := _bounds(plan.fault_tolerance, FaultToleranceSpec()):
        document["fault_tolerance"] = bounds
    return to_yaml(document)


def overrides(plan: Plan, other: Plan) -> dict[str, Any]:
    """The keys that make this plan of a job.yaml whose own plan is the other one; one without `slurm` and `store`."""
    changed = _changed(_work(plan, complete=True), _work(other, complete=True))
    bounds = _bounds(plan.fault_tolerance, other.fault_tolerance)
    return changed | ({"fault_tolerance": bounds} if bounds else {})


def _work(plan: Plan, *, complete: bool) -> dict[str, Any]:
    """What runs on how many nodes; `complete`: those at their default too."""
    roles: dict[str, dict[str, Any]] = {}
    for role in plan.roles:  # with the command as a list, which no shell would split
        fields = msgspec.structs.asdict(role) if complete else msgspec.to_builtins(role)
        roles[role.name] = {key: value for key, value in fields.items() if key != "name" and value is not None}
    first = plan.roles[0]
    is_usual = first.name == PLAIN_ROLE and first.replicas == 1 and first.on_failure == "restart_replica"
    if is_usual and len(plan.roles) == 1:  # a job.yaml without `roles` makes such a plan
        of_role = roles[first.name].items()
        keys = {"nodes_per_replica": "nodes"}
        work = {keys.get(key, key): value for key, value in of_role if key not in ("replicas", "on_failure")}
    else:
        work = {"roles": roles}
    return work | ({"spares": plan.spares} if plan.spares or complete else {})


def _bounds(bounds: FaultToleranceSpec, usual: FaultToleranceSpec) -> dict[str, Any]:
    """The keys whose values are not the usual ones."""
    wanted, there = written(bounds), written(usual)
    # Where nodes are remembered is no part of what the job does; each attempt has a ledger of its own.
    wanted["attribution"]["ledger"] = there["attribution"]["ledger"] = None
    return _changed(wanted, there)


def _changed(wanted: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in wanted.items():
        known = there.get(key)
        if isinstance(value, dict):
            below = _changed(value, known if isinstance(known, dict) else {})
            found |= {key: below} if below else {}
        elif value != known:
            found[key] = value
    return found
