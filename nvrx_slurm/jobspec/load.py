"""Read all layers, merge them once, and know where each value came from.

Precedence: flag > environment (`NVRX_SLURM_<KEY>`, `__` between levels) > job.yaml > the user's site file > the
machine's site file > default. Mappings merge key by key, also with the mapping that a weaker layer's short form
stands for; anything else is replaced as a whole.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import shlex
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from msgspec import Struct
from ruamel.yaml import YAML

from nvrx_slurm.errors import ConfigError, UsageError
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.deprecated import translate_deprecated
from nvrx_slurm.jobspec.model import FOLLOWS, JobSpec
from nvrx_slurm.jobspec.reading import ValueRule, block_of, by_path, dotted, read, rule_below, together, written
from nvrx_slurm.jobspec.yamlfile import KeyPath, YamlFile, read_site_files, read_value, read_yaml

# The origin of what a job without a file takes from its command, such as its name.
COMMAND_LINE = "command line"

# What a key without a value means below these; elsewhere it means nothing.
_EMPTY: dict[tuple[str, ...], Any] = {("env",): "", ("extra",): True}


class Origin(Struct, frozen=True):
    """Where a value came from: a file and line, a variable, a flag, or the default."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class ConfigLayer(Struct, frozen=True):
    """One source's values, and where each key of it stands."""

    name: str
    data: dict[str, Any]
    places: Mapping[KeyPath, Origin]

    def origin(self, path: KeyPath) -> Origin:
        """Where the key stands; or else the block that holds it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        below = path[:-1]  # of a key that is missing: what stands beside it
        beside = (place for key, place in self.places.items() if below and key[: len(below)] == below)
        return next(beside, Origin(self.name))

    def has(self, path: KeyPath) -> bool:
        """Whether it says anything of this key."""
        data: Any = self.data
        for part in path:
            try:
                data = data[part]
            except (KeyError, IndexError, TypeError):
                return False
        return True


class Loaded(Struct, frozen=True):
    """A job's merged configuration. `origin_of`: where a key's value came from."""

    spec: JobSpec
    layers: tuple[ConfigLayer, ...]  # strongest first
    deprecated: tuple[str, ...] = ()
    """One sentence for each deprecated name in use; it names the new one."""

    def origin_of(self, path: KeyPath) -> Origin:
        for layer in self.layers:
            if layer.has(path):
                return layer.origin(path)
        # A default may have been moved by another key: name that one.
        relation, leaders = FOLLOWS.get(path, ("", ()))
        leader = next((leader for leader in leaders if self._value(leader) == self._value(path)), None)
        return Origin("default" if leader is None else f"default, not {relation} than {dotted(leader)}")

    def values(self) -> dict[KeyPath, Any]:
        """Each key with its value as job.yaml holds it, defaults included."""
        return dict(by_path(written(self.spec)))

    def origins(self) -> dict[str, tuple[str, str]]:
        """Each key in one word → its value in JSON, and where that came from: `origins.json` in the job's folder. A
        variable's value is left out (null): it may be a token, and this is for reports."""
        return {
            ".".join(map(str, path)): (
                "null" if "env" in path[:-1] else json.dumps(value, ensure_ascii=False),
                str(self.origin_of(path)),
            )
            for path, value in self.values().items()
        }

    def _value(self, path: KeyPath) -> Any:
        return functools.reduce(getattr, map(str, path), self.spec)


def load(
    path: Path | None,
    flags: Mapping[str, Any] | Iterable[tuple[str, str, Any]] = (),
    *,
    instead: Mapping[str, Any] | None = None,
) -> Loaded:
    """Load job.yaml with every other layer. `flags`: (dotted key, the flag's name, value), strongest of all.
    `path` is None: a job without a file; `instead` is what stands in its place.

    Raises ConfigError: one message that lists every problem with its file, line and key.
    """
    if isinstance(flags, Mapping):
        flags = [(key, key, value) for key, value in flags.items()]
    layers = [
        _keyed("flags", [(tuple(key.split(".")), flag, value) for key, flag, value in flags]),
        _environment(),
        ConfigLayer(COMMAND_LINE, dict(instead or {}), {}) if path is None else _of_file(read_yaml(path)),
        *map(_of_file, read_site_files()),
    ]
    # Before the merge: a deprecated name keeps the strength of the layer that it stands in.
    layers, deprecated = translate_deprecated(layers)
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        if "min_spares" in layer.data:  # of a weaker layer's range it replaces the lower end
            merged = cast("dict[str, Any]", JobSpec.long_form(merged))
        _merge(merged, layer.data, ValueRule(JobSpec))
    spec, complaints = read(JobSpec, merged)
    if spec is None:
        raise _config_error(complaints, layers, COMMAND_LINE if path is None else str(path))
    return Loaded(spec, tuple(layers), deprecated)


def load_without_job() -> JobSpec:
    """What the environment and the site files say, for commands that read no job. Raises ConfigError."""
    # `load` wants a whole job: the name and the command stand for it.
    return load(None, instead={"name": "none", "command": "true"}).spec


def load_job(path: str | Path, **overrides: Any) -> JobSpec:
    """The merged configuration of a job. `overrides` are keys; a double underscore goes a level down.

    >>> load_job("job.yaml", spares=2, slurm__partition="gpu")  # doctest: +SKIP

    Raises ConfigError. Warns of each deprecated name (DeprecationWarning).
    """
    flags = [(key.replace("__", "."), f"{key}=", value) for key, value in overrides.items()]
    loaded = load(Path(path), flags)
    for sentence in loaded.deprecated:
        warnings.warn(sentence, DeprecationWarning, stacklevel=2)
    return loaded.spec


def parse_assignment(text: str) -> tuple[str, str, Any]:
    """`--set a.b=value` → a flag for `load`. A list or a mapping is written as in YAML. Raises UsageError."""
    key, equals, value = text.partition("=")
    if not equals or not key or not all(key.split(".")):
        raise UsageError(f"--set {text}: write it as key=value, such as --set slurm.partition=gpu")
    return key, f"--set {key}", read_value(value, f"--set {key}")


def write_job(path: Path, loaded: Loaded) -> None:
    """A file with what the flags and the job's own file say. The environment and the site files stay where they are:
    they apply again when the file is read. Raises UsageError where the file exists or cannot be written."""
    said: dict[str, Any] = {}
    whole = written(loaded.spec)
    flags, _environment, job_file, *_site = loaded.layers
    for layer in (job_file, flags):  # the flags last: they are the stronger ones
        _pick(said, cast("dict[str, Any]", JobSpec.long_form(layer.data)), whole)
    document = {key: said[key] for key in whole if said.get(key) is not None}  # in the order of the model
    for block in (document, *document.get("roles", {}).values()):
        if "command" in block:
            block["command"] = shlex.join(block["command"])
    yaml = YAML()
    yaml.width = 1_000_000  # no value is folded
    text = io.StringIO()
    yaml.dump(document, text)
    try:
        # `x`: after a look for the file another command could still write it.
        with path.open("x", encoding="utf-8") as file:
            file.write(text.getvalue())
    except FileExistsError:
        raise UsageError(f"--save {path}: the file exists; name another one") from None
    except OSError as error:
        raise UsageError(f"--save {path}: cannot be written: {error.strerror}") from None


def _pick(into: dict[str, Any], layer: dict[str, Any], whole: dict[str, Any]) -> None:
    """The values of the keys that a layer has, as job.yaml holds them."""
    for key, value in layer.items():
        inner = whole[key]
        if isinstance(value, dict) and isinstance(inner, dict):
            _pick(into.setdefault(key, {}), value, inner)
        else:
            into[key] = inner


def _of_file(file: YamlFile) -> ConfigLayer:
    name = str(file.path)
    return ConfigLayer(name, _said(file.data), {key: Origin(name, line) for key, line in file.lines.items()})


def _environment() -> ConfigLayer:
    """`NVRX_SLURM_SLURM__TIME` sets slurm, time. A name below `env` stays as it is; sbatch's flags have dashes."""
    found = []
    for name, value in sorted(env.overrides().items()):
        levels = name.removeprefix(env.PREFIX).split("__")
        *above, last = [level.lower() for level in levels]
        if above[-1:] == ["env"]:
            last = levels[-1]
        elif above[-1:] == ["extra"]:
            last = last.replace("_", "-")
        is_unset = not value and tuple(above[-1:]) not in _EMPTY
        if name not in env.SECRETS and not is_unset:
            found.append(((*above, last), f"${name}", read_value(value, f"${name}")))
    return _keyed("environment", found)


def _keyed(name: str, items: Iterable[tuple[tuple[str, ...], str, Any]]) -> ConfigLayer:
    data: dict[str, Any] = {}
    places: dict[KeyPath, Origin] = {}
    # A key comes ahead of those below it: they are set in its mapping, or refused where it has none. In the other
    # order it would drop them. Of two for one key the last one counts.
    for path, source, value in sorted(items, key=lambda item: len(item[0])):
        branch = data
        for part in path[:-1]:
            below = branch.setdefault(part, {})
            if not isinstance(below, dict):
                raise UsageError(f"{source}: `{part}` was given a value already; it cannot hold `{path[-1]}` too")
            branch = below
        branch[path[-1]] = value
        places[path] = Origin(source)
    return ConfigLayer(name, data, places)


def _merge(into: dict[str, Any], data: Mapping[str, Any], rule: ValueRule | None) -> None:
    """`rule`: that of both mappings, where they are blocks or hold some."""
    for key, value in data.items():
        if not isinstance(value, dict):
            into[key] = value
            continue
        below = rule and rule_below(rule, key)
        weaker = into.get(key)
        if below and (block := block_of(below)) and not isinstance(weaker, dict):
            with contextlib.suppress(ValueError):  # it stands for nothing, and so gives way
                weaker = block.long_form(weaker)
        # A copy: a stronger layer must not change this one's data.
        into[key] = dict(weaker) if isinstance(weaker, dict) else {}
        _merge(into[key], value, below)


def _said(data: dict[str, Any], below: tuple[str, ...] = ()) -> dict[str, Any]:
    """The data without keys that have no value."""
    said: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            said[key] = _said(value, (key,))
        elif value is not None or below in _EMPTY:
            said[key] = _EMPTY[below] if value is None else value
    return said


def _config_error(complaints: Mapping[KeyPath, str], layers: list[ConfigLayer], job: str) -> ConfigError:
    found = []
    for key, sentence in complaints.items():
        # The strongest layer that has the key; of a key that is missing, one that has its block.
        layer = next((layer for layer in layers if key and layer.has(key[:1])), None)
        layer = next((layer for layer in layers if key and layer.has(key)), layer)
        origin = layer.origin(key) if layer else Origin(job)
        found.append(ConfigError(sentence, file=origin.source, line=origin.line, key=dotted(key) or None))
    return together(found)
