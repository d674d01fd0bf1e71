"""A rule as a file writes it, and every way in which it can be wrong as one sentence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec.yamlfile import YamlFile
from nvrx_slurm.journal.verdicts import Scope

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
    hint: str = ""
    reference: str = ""
    sample: tuple[str, ...] = ()
    not_sample: tuple[str, ...] = ()


KEYS = RuleForm.__struct_fields__
_REQUIRED = KEYS[: len(KEYS) - len(RuleForm.__struct_defaults__)]
_LIST = "must be a list of lines, each after `- `"
VALID: Mapping[str, str] = {
    "fault": "must be a class of failure in lower case, such as `cuda_oom`",
    "verdict": "must be RESTART, STOP or UNKNOWN",
    "scope": f"must be one of {', '.join(Scope)}",
    "role": "must be cause, consequence or noise",
    "severity": "must be a whole number from 0 to 100",
    "ignore_case": "must be true or false",
    "widespread": "must be true or false",
    "sample": _LIST,
    "not_sample": _LIST,
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
            raise wrong(f"is not known; {_nearest(key)}", file, name, key)
    for key in _REQUIRED:
        if key not in data:
            raise wrong("is required", file, name, key)
    return _converted(data, file, name)


def _converted(data: dict[str, Any], file: YamlFile, name: str) -> RuleForm:
    try:
        return msgspec.convert(data, RuleForm, strict=False)
    except msgspec.ValidationError as error:
        match = _WHERE.search(str(error))
        assert match is not None, error  # every key's value is checked by its own type
        key = match["key"]
        raise wrong(f"{VALID.get(key, 'must be text')}, not {data[key]!r}", file, name, key) from None


def _nearest(key: str) -> str:
    near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.5)
    return f"did you mean `{near[0]}`?" if near else f"valid here: {', '.join(KEYS)}"
