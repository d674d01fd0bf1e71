"""Takes out of log lines what must not leave the site: secrets, people, machines; pure.

What is alike stays alike (`[node 1]` is always the same node), so that the lines can still be reasoned about.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_SECRET = "[secret]"
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]*KEY-----.*"), _SECRET),
    (re.compile(r"(?i)\b(Bearer|Basic)\s+[\w.~+/=-]{6,}"), rf"\1 {_SECRET}"),
    (
        re.compile(
            r"(?i)([\w.-]*(?:token|secret|passw(?:or)?d|api[_-]?key|access[_-]?key|credential|authorization|signature)"
            r"[\w.-]*[\"']?\s*[=:]\s*)(?:\"[^\"]*\"|'[^']*'|[^\s,;&}]+)"
        ),
        rf"\1{_SECRET}",
    ),
    (re.compile(r"\b(?:sk-|hf_|gh[pousr]_|glpat-|xox[abp]-|nvapi-|AKIA|ASIA|AIza|eyJ)[\w.-]{10,}"), _SECRET),
    (re.compile(r"(\w+://)[^/\s@]+@"), rf"\1{_SECRET}@"),
    (re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b"), "[e-mail]"),
    (re.compile(r"(/(?:home|users|Users|u)/)[^/\s:'\"]+"), r"\1[user]"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b"), "[address]"),
    (re.compile(r"(?<![\w:.])(?:[0-9a-fA-F]{1,4}:){4,7}[0-9a-fA-F]{1,4}(?![\w:])"), "[address]"),
    (
        re.compile(r"(?<![\w/.-])(?:[\w-]+\.)+(?:com|org|net|edu|gov|mil|local|internal|lan|corp|cloud|ai|io)\b"),
        "[host]",
    ),
    (re.compile(r"\b(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9+_-]{32,}={0,2}"), _SECRET),
)


def redacted(lines: Iterable[str], nodes: Sequence[str] = ()) -> list[str]:
    """The lines without secrets, e-mail and network addresses, host names, and names of users in paths."""
    known = {node: f"[node {index}]" for index, node in enumerate(dict.fromkeys(nodes), start=1)}
    return [_line(line, known) for line in lines]


def _line(line: str, known: dict[str, str]) -> str:
    for pattern, instead in _RULES:
        line = pattern.sub(instead, line)
    for node, instead in known.items():
        line = re.sub(rf"(?<![\w-]){re.escape(node)}(?![\w-])", instead, line)
    return line
