"""A rule's pattern in a form that Vectorscan takes, and that finds something wherever the pattern matches a line.

What looks beyond what it matches (word boundaries, look-around) is left out, a line may begin after whatever ends a
label, repetitions lose their upper bound, a reference to a group is any text. So where this form finds nothing, the
pattern finds nothing either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from re import _parser  # type: ignore[attr-defined]  # the only reader of this syntax that cannot differ from `re` itself
from typing import Any

from nvrx_slurm.attribution.catalogue import Rule
from nvrx_slurm.errors import ConfigError

_WORD = frozenset(byte for byte in range(128) if chr(byte).isalnum() or byte == ord("_"))
_CATEGORIES = {
    "CATEGORY_DIGIT": frozenset(b"0123456789"),
    "CATEGORY_SPACE": frozenset(b" \t\n\r\f\v"),
    "CATEGORY_WORD": _WORD,
}
_BEGINS = r"(?:^|[\x0d\x00]|\]:? ?|[0-9>]: ?|\| ?|\+ |(?:^|[\x0d\x00])[A-Za-z][A-Za-z0-9_.\x2d]*: )"
"""Where a line proper may begin: after any of the labels that labels.py knows."""

_ENDS = frozenset(b"\n\r\0")
_ALL = frozenset(range(256))
_IN_A_LINE = _ALL - _ENDS


Form = tuple[bytes, bool]
"""An expression, and whether case does not matter in it."""


def relaxed(rule: Rule) -> Form:
    """The form of a rule's pattern; of one that matches nothing in particular that of its literals."""
    tree = _parser.parse(rule.pattern.pattern, re.IGNORECASE if rule.ignore_case else 0)
    expression = _sequence(tree)
    caseless = bool(tree.state.flags & re.IGNORECASE) or b"(?i" in rule.pattern.pattern
    return (expression.encode(), caseless) if expression else relaxed_to_literals(rule)


def relaxed_to_literals(rule: Rule) -> Form:
    """Any of a rule's literals: a form that Vectorscan takes in any case. Raises ConfigError: it has none."""
    if not rule.literals or not all(rule.literals):
        raise ConfigError(f"rule {rule.name} has no literals, so that no search can find it", key=rule.name)
    texts = ("".join(_bytes(frozenset([byte])) for byte in literal) for literal in rule.literals)
    return "|".join(texts).encode(), rule.ignore_case


def _sequence(tree: Iterable[tuple[Any, Any]]) -> str:
    return "".join(_part(str(kind), value) for kind, value in tree)


def _part(kind: str, value: Any) -> str:
    if kind == "LITERAL":
        return _class(frozenset([value]))
    if kind == "NOT_LITERAL":
        return _class(_ALL - {value})
    if kind == "IN":
        return _class(_set(value))
    if kind == "ANY":
        return _class(_ALL)
    if kind == "SUBPATTERN":
        return f"(?:{_sequence(value[-1])})"
    if kind == "ATOMIC_GROUP":
        return f"(?:{_sequence(value)})"
    if kind == "BRANCH":
        return f"(?:{'|'.join(map(_sequence, value[1]))})"
    if kind.endswith("_REPEAT"):
        least, most, inner = value
        return (
            f"(?:{_sequence(inner)}){'?' if most == 1 else '+' if least else '*'}" if (least, most) != (1, 1) else ""
        )
    if kind == "AT":
        return _BEGINS if str(value).startswith("AT_BEGINNING") else ""
    return "" if kind in ("ASSERT", "ASSERT_NOT") else f"{_class(_ALL)}*"


def _set(members: Iterable[tuple[Any, Any]]) -> frozenset[int]:
    found: set[int] = set()
    negated = False
    for kind, value in members:
        if str(kind) == "NEGATE":
            negated = True
        elif str(kind) == "LITERAL":
            found.add(value)
        elif str(kind) == "RANGE":
            found.update(range(value[0], value[1] + 1))
        else:
            found |= _category(str(value))
    return _ALL - found if negated else frozenset(found)


def _category(name: str) -> frozenset[int]:
    inverse = name.replace("_NOT_", "_")
    return _CATEGORIES[name] if name in _CATEGORIES else _ALL - _CATEGORIES[inverse]


def _class(members: frozenset[int]) -> str:
    """Bytes that stand in a line: no line holds its own end, so that no match leaves a line."""
    return _bytes(members & _IN_A_LINE)


def _bytes(members: frozenset[int]) -> str:
    shown = "".join(f"\\x{byte:02x}" for byte in sorted(members))
    return f"[{shown}]" if len(members) > 1 else shown or "[^\\x00-\\xff]"
