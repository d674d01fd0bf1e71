"""YAML with the line of every key, and every way in which a file can be bad as one ConfigError."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from nvrx_slurm.errors import ConfigError

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class YamlFile:
    """The plain value of a file, and the line (from 1) at which each of its keys stands."""

    path: Path
    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)


def read_yaml(path: Path) -> YamlFile:
    """Read a file whose top level is a mapping; an empty file is an empty mapping. Raises ConfigError."""
    file = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", file=file) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text (byte {error.start})", file=file) from None
    tree = _parse(text, file)
    if tree is None:
        return YamlFile(path, {})
    if not isinstance(tree, CommentedMap):
        raise ConfigError("the top level must be a mapping of keys, such as `name: train`", file=file, line=1)
    lines: dict[KeyPath, int] = {}
    return YamlFile(path, _plain(tree, (), lines, file), lines)


def read_scalar(text: str) -> Any:
    """One value as YAML reads it: `4` is a number, `[a, b]` a list, anything odd is text."""
    try:
        value = YAML(typ="safe", pure=True).load(text)
    except YAMLError:
        return text
    return text if value is None else value


def _parse(text: str, file: str) -> Any:
    try:
        return YAML(typ="rt").load(text)
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        problem = (
            str(error.problem).partition(" with value")[0].replace("found duplicate key", "the key stands twice:")
        )
        raise ConfigError(problem, file=file, line=line) from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(_problem(error), file=file, line=mark.line + 1 if mark else None) from None
    except YAMLError as error:
        raise ConfigError(f"is not YAML: {error}".splitlines()[0], file=file) from None


def _problem(error: MarkedYAMLError) -> str:
    problem = str(error.problem or error.context or "cannot be parsed")
    if "'\\t'" in problem:
        return "a tab stands where YAML wants spaces; indent with spaces"
    return f"is not YAML: {problem}" + (f" ({error.context})" if error.context and error.problem else "")


def _plain(node: Any, at: KeyPath, lines: dict[KeyPath, int], file: str) -> Any:
    """The value without ruamel's clothes; notes each key's line on the way."""
    if isinstance(node, CommentedMap):
        for key in node:
            line = node.lc.key(key)[0] + 1
            if not isinstance(key, str):
                raise ConfigError(f"the key {key!r} must be text; put it in quotes", file=file, line=line)
            lines[*at, key] = line
        return {key: _plain(value, (*at, key), lines, file) for key, value in node.items()}
    if isinstance(node, CommentedSeq):
        for index in range(len(node)):
            lines[*at, index] = node.lc.item(index)[0] + 1
        return [_plain(value, (*at, index), lines, file) for index, value in enumerate(node)]
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return node if kind is bool else kind(node)
    return node if node is None else str(node)
