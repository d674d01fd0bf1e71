"""YAML with the line of every key, and every way in which a file can be bad as one ConfigError.

Every value is text as it was written, and the model makes numbers of it where it wants numbers: so `VERSION: 1.10` in
a job's environment arrives as `1.10`, `account: 0123` as `0123`, and `nodes: 1e9` is refused by that name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec.site import site_files

KeyPath = tuple[str | int, ...]

# More than any job.yaml holds; fewer than a file whose aliases multiply one another.
MOST_VALUES = 100_000

_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"
_KNOWN = {_TAG + kind for kind in ("map", "seq", "str", "null", "bool", "int", "float", "timestamp")}


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
    if not isinstance(tree, MappingNode):
        raise ConfigError("the top level must be a mapping of keys, such as `name: train`", file=file, line=1)
    values = _Values(file)
    return YamlFile(path, values.of(tree, ()), values.lines)


def read_site_files() -> list[YamlFile]:
    """The site files that exist, strongest first. Raises ConfigError."""
    found = []
    for path in site_files():
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            pass  # it may exist, and what it sets must not be lost: `read_yaml` says why it cannot be read
        found.append(read_yaml(path))
    return found


def read_value(text: str, source: str) -> Any:
    """The value of a flag or a variable: `[a, b]` and `{a: b}` as in YAML, all else is text. Raises ConfigError."""
    if not text.lstrip().startswith(("[", "{")):
        return text
    tree = _parse(text, source)
    assert tree is not None
    return _Values(source).of(tree, ())


def _parse(text: str, file: str) -> Node | None:
    try:
        # compose, not load: a node knows its line, and its text as it was written.
        tree: Node | None = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = "is not YAML: " + ", ".join(str(part) for part in (error.context, error.problem) if part)
        if "'\\t'" in str(error.problem):
            problem = "a tab stands where YAML wants spaces; indent with spaces"
        raise ConfigError(problem, file=file, line=mark.line + 1 if mark else None) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"is not YAML: the character U+{error.character:04X}", file=file, line=line) from None
    except YAMLError as error:
        raise ConfigError(f"is not YAML: {error}".splitlines()[0], file=file) from None
    except RecursionError:
        raise ConfigError("is nested too deeply", file=file) from None
    return tree


class _Values:
    """Makes plain values of nodes; `lines` fills with each key's line on the way."""

    def __init__(self, file: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._file = file
        self._open: set[int] = set()
        self._count = 0

    def of(self, node: Node, at: KeyPath) -> Any:
        """Text, None, or a list or mapping of such."""
        self._count += 1
        if self._count > MOST_VALUES:
            raise self._wrong(f"holds more than {MOST_VALUES} values, its aliases (`*name`) included", node)
        if id(node) in self._open:
            raise self._wrong("an alias (`*name`) must not stand inside the value that it names", node)
        if node.tag not in _KNOWN:
            raise self._wrong(f"the tag {node.tag} has no meaning here; leave it out", node)
        if isinstance(node, ScalarNode):
            text = node.value
            if node.tag == _TAG + "null" or text.isascii():
                return None if node.tag == _TAG + "null" else text
            # JSON's two escapes for one character beyond U+FFFF are that one character again.
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        # While it is open, an alias to it would be a value inside itself, without end.
        self._open.add(id(node))
        value: Any
        if isinstance(node, SequenceNode):
            self.lines |= {(*at, index): _line(item) for index, item in enumerate(node.value)}
            value = [self.of(item, (*at, index)) for index, item in enumerate(node.value)]
        else:
            value = self._mapping(node, at)
        self._open.discard(id(node))
        return value

    def _mapping(self, node: Node, at: KeyPath) -> dict[str, Any]:
        """The mapping's own keys, on top of those that `<<: *base` brings."""
        merged: dict[str, Any] = {}
        bases: list[Node] = []
        for key, value in node.value:
            if key.tag == _MERGE:
                bases += value.value if isinstance(value, SequenceNode) else [value]
        for base in reversed(bases):  # the first of several wins
            if not isinstance(base, MappingNode):
                raise self._wrong("`<<` must name a mapping", base)
            # `of` enters the lines of the base's keys. Those of this mapping's own keys come later, and replace them.
            merged |= self.of(base, at)
        own: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag == _MERGE:
                continue
            if not isinstance(key, ScalarNode):
                raise self._wrong("a key must be text, not a list or a mapping", key)
            if key.value in own:
                first = self.lines[*at, key.value]
                raise self._wrong(f"the key `{key.value}` stands twice (first at line {first})", key)
            self.lines[*at, key.value] = _line(key)
            own[key.value] = self.of(value, (*at, key.value))
        return merged | own

    def _wrong(self, message: str, node: Node) -> ConfigError:
        return ConfigError(message, file=self._file, line=_line(node))


def _line(node: Node) -> int:
    line: int = node.start_mark.line + 1
    return line
