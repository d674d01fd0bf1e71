"""Reads a file of rules: a plain one, as all shipped files are, at once; any other YAML as job.yaml is read.

A general YAML reader takes a second and more for the shipped rules, and a failure is waiting. In a plain file a
rule's name stands at the left, a key two spaces in, a list's `- item` four, and each text on one line, bare or in
single quotes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from nvrx_slurm.jobspec.yamlfile import KeyPath, YamlFile, read_yaml

_TEXT = r"(?:'(?P<quoted>(?:[^']|'')*)'|(?P<bare>[A-Za-z0-9](?:[^\s:#]|(?<! )#|:(?=\S)| (?=[^\s#]))*))"
_NAME = re.compile(r"(?P<name>[A-Za-z][\w.]*):")
_KEY = re.compile(rf"  (?P<name>[a-z]\w*):(?: {_TEXT})?")
_ITEM = re.compile(rf"    - {_TEXT}")
_NULLS = {"null", "Null", "NULL"}


def read_rule_file(path: Path) -> YamlFile:
    """What `read_yaml` says of the file, sooner where the file is plain. Raises ConfigError."""
    try:
        plain = _Plain(path.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError, _NotPlain):
        return read_yaml(path)
    return YamlFile(path, plain.data, plain.lines)


class _NotPlain(Exception):
    """The file is some other YAML, or wrong."""


class _Plain:
    """The value of a plain file and its lines, as in `YamlFile`."""

    def __init__(self, text: str) -> None:
        self.data: dict[str, Any] = {}
        self.lines: dict[KeyPath, int] = {}
        self._rule: dict[str, Any] = {}
        self._list: list[str] | None = None
        self._at: KeyPath = ()
        for number, line in enumerate(text.split("\n"), start=1):
            if line and not line.startswith("#"):
                self.lines[self._take(line)] = number
        if not all(self.data.values()) or [] in [value for rule in self.data.values() for value in rule.values()]:
            raise _NotPlain

    def _take(self, line: str) -> KeyPath:
        """Where the line's value stands, which is then in `data`."""
        if line.startswith("    "):
            return self._append(_matched(_ITEM, line))
        if line.startswith("  "):
            return self._add(_matched(_KEY, line))
        return self._open_rule(_matched(_NAME, line)["name"])

    def _open_rule(self, name: str) -> KeyPath:
        if name in self.data:
            raise _NotPlain
        self._rule, self._list, self._at = {}, None, (name,)
        self.data[name] = self._rule
        return self._at

    def _add(self, match: re.Match[str]) -> KeyPath:
        key, text = match["name"], _text(match)
        if not self._at or key in self._rule:
            raise _NotPlain
        self._list = [] if text is None else None
        self._rule[key] = self._list if text is None else text
        self._at = (self._at[0], key)
        return self._at

    def _append(self, match: re.Match[str]) -> KeyPath:
        text = _text(match)
        if self._list is None or text is None:
            raise _NotPlain
        self._list.append(text)
        return (*self._at, len(self._list) - 1)


def _matched(pattern: re.Pattern[str], line: str) -> re.Match[str]:
    match = pattern.fullmatch(line)
    if match is None:
        raise _NotPlain
    return match


def _text(match: re.Match[str]) -> str | None:
    quoted, bare = match["quoted"], match["bare"]
    if quoted is not None:
        return quoted.replace("''", "'")
    if bare in _NULLS:
        raise _NotPlain
    return bare
