"""What stands below `expect` of a flow file → expectations, every problem with its line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nvrx_slurm.jobspec.reading import Misfit
from nvrx_slurm.jobspec.yamlfile import KeyPath
from nvrx_slurm.lab.flow.language.event_form import (
    check_keys,
    mapping,
    read_duration,
    read_event,
    read_only_event,
)
from nvrx_slurm.lab.flow.language.events import EventPattern
from nvrx_slurm.lab.flow.language.expected import AnyOrder, Count, Eventually, Expectation, Happens, Never
from nvrx_slurm.lab.flow.language.parsing import parse_pattern
from nvrx_slurm.lab.flow.language.patterns import Compares, Equals, Pattern, captures
from nvrx_slurm.lab.flow.language.problems import Problems

EXAMPLE = "job_ended: {exit_code: 0}"
EXTRAS: dict[str, tuple[str, ...]] = {
    "any_order": (),
    "eventually": ("within",),
    "never": ("until",),
    "count": ("is", "until"),
}
"""What an item can begin with besides an event's name → what may stand beside it."""
EVENT_EXTRAS = ("within",)
_ALL_EXTRAS = {"within", "until", "is"}


def read_expectations(problems: Problems, raw: Sequence[Any], at: KeyPath) -> tuple[Expectation, ...]:
    """The list's items. One that cannot be read is a problem, and left out."""
    found: list[Expectation] = []
    for index, item in enumerate(raw):
        with problems.caught(*at, index):
            found.append(_expectation(problems, item, (*at, index)))
    return tuple(found)


def _expectation(problems: Problems, raw: Any, at: KeyPath) -> Expectation:
    item = {raw: None} if isinstance(raw, str) else mapping(raw, EXAMPLE)
    head = _head(item)
    check_keys(item.keys() - {head}, EXTRAS.get(head, EVENT_EXTRAS), beside=head)
    read = _FORMS.get(head)
    if read is not None:
        return read(problems, item, at)
    return Happens(problems.line(at), read_event(problems, head, item[head], at), read_duration(item, "within"))


def _head(item: Mapping[str, Any]) -> str:
    """The key that says what the item is; the others stand beside it."""
    heads = [key for key in item if key not in _ALL_EXTRAS]
    if len(heads) != 1:
        seen = f"{' and '.join(f'`{head}`' for head in heads)}; write each as an item of its own" if heads else "none"
        raise Misfit(f"an item has one event, as `{EXAMPLE}` has, not {seen}")
    return heads[0]


def _any_order(problems: Problems, item: Mapping[str, Any], at: KeyPath) -> Expectation:
    raw, below = item["any_order"], (*at, "any_order")
    if not isinstance(raw, list) or not raw:
        raise Misfit("must be a list of items, or of lists of items", "any_order")
    branches = []
    for index, branch in enumerate(raw):
        if isinstance(branch, list):
            branches.append(read_expectations(problems, branch, (*below, index)))
        else:
            with problems.caught(*below, index):
                branches.append((_expectation(problems, branch, (*below, index)),))
    return AnyOrder(problems.line(at), tuple(branches))


def _eventually(problems: Problems, item: Mapping[str, Any], at: KeyPath) -> Expectation:
    return Eventually(problems.line(at), _event(problems, item, at, "eventually"), read_duration(item, "within"))


def _never(problems: Problems, item: Mapping[str, Any], at: KeyPath) -> Expectation:
    return Never(problems.line(at), _event(problems, item, at, "never"), _until(problems, item, at))


def _count(problems: Problems, item: Mapping[str, Any], at: KeyPath) -> Expectation:
    event, until = _event(problems, item, at, "count"), _until(problems, item, at)
    return Count(problems.line(at), event, _wanted(item), until)


def _until(problems: Problems, item: Mapping[str, Any], at: KeyPath) -> EventPattern | None:
    return _event(problems, item, at, "until") if "until" in item else None


def _event(problems: Problems, item: Mapping[str, Any], at: KeyPath, key: str) -> EventPattern:
    try:
        return read_only_event(problems, item[key], (*at, key), f"{key}: {{node_lost: {{node: $dead}}}}")
    except Misfit as misfit:
        raise Misfit(str(misfit), key, *misfit.path) from None


def _wanted(item: Mapping[str, Any]) -> Pattern:
    if "is" not in item:
        raise Misfit("needs `is`: how often, such as `is: 3` or `is: '>= 2'`", "count")
    try:
        wanted = parse_pattern(item["is"], int)
    except Misfit as misfit:
        raise Misfit(str(misfit), "is") from None
    if not isinstance(wanted, (Equals, Compares)) or any(captures(wanted)):
        raise Misfit(f"must be a number such as 3, or a comparison such as '>= 2', not {item['is']!r}", "is")
    return wanted


_FORMS: dict[str, Callable[[Problems, Mapping[str, Any], KeyPath], Expectation]] = {
    "any_order": _any_order,
    "eventually": _eventually,
    "never": _never,
    "count": _count,
}
