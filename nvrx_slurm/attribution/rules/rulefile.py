"""One file of rules: read as YAML, and each of its rules checked.

A general YAML reader takes a second and more for the built-in rules, and a failure is waiting. So a plain file, as
all built-in files are, is read here: a rule's name stands at the left, a key two spaces in, a list's `- item` four,
and each text on one line, bare or in single quotes. Any other YAML is read as job.yaml is.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec.yamlfile import KeyPath, YamlFile, read_yaml
from nvrx_slurm.journal.verdicts import Scope

_TEXT = r"(?:'(?P<quoted>(?:[^']|'')*)'|(?P<bare>[A-Za-z0-9](?:[^\s:#]|(?<! )#|:(?=\S)| (?=[^\s#]))*))"
_NAME = re.compile(r"(?P<name>[A-Za-z][\w.]*):")
_KEY = re.compile(rf"  (?P<name>[a-z]\w*):(?: {_TEXT})?")
_ITEM = re.compile(rf"    - {_TEXT}")
_NULLS = {"null", "Null", "NULL"}


def read_rule_file(path: Path) -> YamlFile:
    """What `read_yaml` says of the file, sooner where the file is plain. Raises ConfigError."""
    try:
        return read_plain(path)
    except (OSError, UnicodeDecodeError, NotPlain):
        return read_yaml(path)


class NotPlain(Exception):
    """The file is some other YAML, or wrong."""


def read_plain(path: Path) -> YamlFile:
    """A plain file. Raises NotPlain."""
    data: dict[str, Any] = {}
    lines: dict[KeyPath, int] = {}
    rule: dict[str, Any] = {}
    items: list[str] | None = None
    at: KeyPath = ()
    # ASCII alone: a byte order mark, and the other ends of lines in Unicode, are left to the general reader.
    for number, line in enumerate(path.read_text(encoding="ascii").split("\n"), start=1):
        if not line or line.startswith("#"):
            continue
        if line.startswith("    "):  # an item of a list
            text = _text(_matched(_ITEM, line))
            if items is None or text is None:
                raise NotPlain
            items.append(text)
            lines[*at, len(items) - 1] = number
            continue
        if line.startswith("  "):  # a key of a rule
            match = _matched(_KEY, line)
            key, text = match["name"], _text(match)
            if not at or key in rule:
                raise NotPlain
            items = [] if text is None else None
            rule[key] = items if text is None else text
            at = (at[0], key)
        else:
            name = _matched(_NAME, line)["name"]
            if name in data:
                raise NotPlain
            rule, items, at = {}, None, (name,)
            data[name] = rule
        lines[at] = number
    if not all(data.values()) or [] in [value for rule in data.values() for value in rule.values()]:
        raise NotPlain  # a rule without keys, or a list without items
    return YamlFile(path, data, lines)


def _matched(pattern: re.Pattern[str], line: str) -> re.Match[str]:
    match = pattern.fullmatch(line)
    if match is None:
        raise NotPlain
    return match


def _text(match: re.Match[str]) -> str | None:
    quoted, bare = match["quoted"], match["bare"]
    if quoted is not None:
        return quoted.replace("''", "'")
    if bare in _NULLS:
        raise NotPlain
    return bare


Role = Literal["cause", "consequence", "noise"]
Severity = Annotated[int, msgspec.Meta(ge=0, le=100)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]*$")]


class RuleForm(msgspec.Struct, frozen=True):
    """The keys of one rule; those without a default are required."""

    fault: Name
    pattern: str
    verdict: Literal["RESTART", "STOP", "UNKNOWN"]
    scope: Scope
    role: Role = "cause"
    severity: Severity = 50
    ignore_case: bool = False
    widespread: bool = False
    below: bool = False
    shell: bool = False
    environment: bool = False
    hint: str = ""
    reference: str = ""
    sample: tuple[str, ...] = ()
    not_sample: tuple[str, ...] = ()


KEYS = RuleForm.__struct_fields__
_REQUIRED = KEYS[: len(KEYS) - len(RuleForm.__struct_defaults__)]
VALID: Mapping[str, str] = {
    "fault": "must be a class of failure in lower case, such as `cuda_oom`",
    "verdict": "must be RESTART, STOP or UNKNOWN",
    "scope": f"must be one of {', '.join(Scope)}",
    "role": "must be cause, consequence or noise",
    "severity": "must be a whole number from 0 to 100",
    **dict.fromkeys(("ignore_case", "widespread", "below", "shell", "environment"), "must be true or false"),
    **dict.fromkeys(("sample", "not_sample"), "must be a list of lines, each after `- `"),
}
_WHERE = re.compile(r"at `\$\.(?P<key>\w+)")


def wrong(message: str, file: YamlFile, name: str, key: str | None = None) -> ConfigError:
    """An error that names the file, the line and the key; the rule's own line where the key stands nowhere."""
    line = file.lines.get((name, key)) if key else None
    dotted = name if key is None else f"{name}.{key}"
    return ConfigError(message, file=str(file.path), line=line or file.lines.get((name,)), key=dotted)


def form_of(file: YamlFile, name: str) -> RuleForm:
    """The rule that the file has below `name`. Raises ConfigError."""
    data = file.data[name]
    if not isinstance(data, dict):
        raise wrong(f"must be a mapping with the keys {', '.join(_REQUIRED)}", file, name)
    for key in data:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.5)
            hint = f"did you mean `{near[0]}`?" if near else f"valid here: {', '.join(KEYS)}"
            raise wrong(f"is not known; {hint}", file, name, key)
    for key in _REQUIRED:
        if key not in data:
            raise wrong("is required", file, name, key)
    try:
        return msgspec.convert(data, RuleForm, strict=False)
    except msgspec.ValidationError as error:
        match = _WHERE.search(str(error))
        assert match is not None, error  # every key's value is checked by its own type
        key = match["key"]
        raise wrong(f"{VALID.get(key, 'must be text')}, not {data[key]!r}", file, name, key) from None
