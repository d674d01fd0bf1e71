"""What pydantic found wrong, as sentences: where, what was seen, what is valid."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec.values import Misfit
from nvrx_slurm.jobspec.yamlfile import KeyPath

MOST_SHOWN = 60

_SENTENCES = {
    "missing": "is required",
    "int_type": "must be a whole number, not {input!r}",
    "int_parsing": "must be a whole number, not {input!r}",
    "int_from_float": "must be a whole number, not {input!r}",
    "float_type": "must be a number, not {input!r}",
    "float_parsing": "must be a number, not {input!r}",
    "string_type": "must be text, not {input!r}",
    "bool_type": "must be true or false, not {input!r}",
    "bool_parsing": "must be true or false, not {input!r}",
    "dict_type": "must be a mapping of keys, not {input!r}",
    "model_type": "must be a mapping of keys, not {input!r}",
    "model_attributes_type": "must be a mapping of keys, not {input!r}",
    "tuple_type": "must be a list, not {input!r}",
    "list_type": "must be a list, not {input!r}",
    "greater_than_equal": "must be at least {ge}, not {input!r}",
    "less_than_equal": "must be at most {le}, not {input!r}",
    "literal_error": "must be one of {expected}, not {input!r}",
    "value_error": "{error}",
}


def complaints(error: ValidationError, root: type[BaseModel], data: Any) -> Mapping[KeyPath, str]:
    """Key path → what is wrong there, in `data`; for a union of types the first complaint stands for all."""
    found: dict[KeyPath, str] = {}
    for item in error.errors():
        path = _key_path(item, data) + _misfit(item)
        found.setdefault(path, _sentence(item, path, root))
    return found


def dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def together(found: Sequence[ConfigError]) -> ConfigError:
    """One error that tells all of these, in the order of their files and lines."""
    if len(found) == 1:
        return found[0]
    told = sorted(found, key=lambda one: (one.file or "", one.line or 0))
    return ConfigError("\n  ".join([f"{len(told)} problems:", *map(str, told)]))


def _sentence(item: Any, path: KeyPath, root: type[BaseModel]) -> str:
    if item["type"] == "extra_forbidden":
        return f"is not known; {_hint(str(path[-1]), list(_block_at(path[:-1], root).model_fields), root)}"
    template = _SENTENCES.get(item["type"])
    if template is None:
        return str(item["msg"])
    return template.format(input=_shown(item["input"]), **item.get("ctx", {}))


def _hint(key: str, valid: list[str], root: type[BaseModel]) -> str:
    """The key that was meant: one that goes on like it, or is spelled alike, or stands in another block."""
    near = [name for name in valid if name.startswith(f"{key}_")] or difflib.get_close_matches(key, valid, cutoff=0.7)
    near = near or [dotted(path) for name, path in _homes(root) if name == key]
    near = near or difflib.get_close_matches(key, valid, cutoff=0.5)
    return f"did you mean `{near[0]}`?" if near else f"valid here: {', '.join(valid) or 'nothing'}"


def _shown(value: object) -> object:
    """A long text is shown by its beginning."""
    return value[:MOST_SHOWN] + "…" if isinstance(value, str) and len(value) > MOST_SHOWN else value


def _misfit(item: Any) -> KeyPath:
    """Below the mapping that pydantic names: the key that is meant."""
    error = item.get("ctx", {}).get("error")
    return error.path if isinstance(error, Misfit) else ()


def _key_path(item: Any, data: Any) -> KeyPath:
    """The part of pydantic's location that are keys of the data; the rest names branches of unions."""
    path: list[int | str] = []
    for part in item["loc"]:
        there = part in data if isinstance(data, dict) else isinstance(data, list) and isinstance(part, int)
        if not there and item["type"] != "missing":
            break
        path.append(part)
        data = data[part] if there else None
    return tuple(path)


def _block_at(path: KeyPath, root: type[BaseModel]) -> type[BaseModel]:
    """The block in which the path ends. A role's name is no key of a block, and leads nowhere else."""
    block = root
    for part in path:
        field = block.model_fields.get(str(part))
        block = (field and _block_of(field.annotation)) or block
    return block


def _homes(block: type[BaseModel], at: KeyPath = ()) -> Iterator[tuple[str, KeyPath]]:
    """Every key of the block and below, with its path; roles aside, whose names are the user's."""
    for name, field in block.model_fields.items():
        yield name, (*at, name)
        inner = _block_of(field.annotation)
        if inner is not None and name != "roles":
            yield from _homes(inner, (*at, name))


def _block_of(annotation: Any) -> type[BaseModel] | None:
    """The block that a field's type holds, directly, as an option, or as a mapping's value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        if (found := _block_of(inner)) is not None:
            return found
    return None
