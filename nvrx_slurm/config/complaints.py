"""What pydantic found wrong, as sentences: where, what was seen, what is valid."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from nvrx_slurm.config.model import Misfit
from nvrx_slurm.config.yamlfile import KeyPath

MOST_SHOWN = 60

_SENTENCES = {
    "missing": "is required",
    "int_type": "must be a whole number, not {input!r}",
    "int_parsing": "must be a whole number, not {input!r}",
    "int_from_float": "must be a whole number, not {input!r}",
    "string_type": "must be text, not {input!r}",
    "bool_type": "must be true or false, not {input!r}",
    "bool_parsing": "must be true or false, not {input!r}",
    "dict_type": "must be a mapping of keys, not {input!r}",
    "model_type": "must be a mapping of keys, not {input!r}",
    "model_attributes_type": "must be a mapping of keys, not {input!r}",
    "tuple_type": "must be a list, not {input!r}",
    "greater_than_equal": "must be at least {ge}, not {input!r}",
    "less_than_equal": "must be at most {le}, not {input!r}",
    "literal_error": "must be one of {expected}, not {input!r}",
    "value_error": "{error}",
}


def complaints(error: ValidationError, root: type[BaseModel]) -> Mapping[KeyPath, str]:
    """Key path → what is wrong there; for a union of types the first complaint stands for all."""
    found: dict[KeyPath, str] = {}
    for item in error.errors():
        path = _key_path(item["loc"], root) + _misfit(item)
        found.setdefault(path, _sentence(item, path, root))
    return found


def unknown_key(key: str, valid: list[str]) -> str:
    """`is not known; did you mean …`"""
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    hint = f"did you mean `{near[0]}`?" if near else f"valid here: {', '.join(valid)}"
    return f"is not known; {hint}"


def dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def _sentence(item: Any, path: KeyPath, root: type[BaseModel]) -> str:
    if item["type"] == "extra_forbidden":
        return unknown_key(str(path[-1]), list(_model_at(path[:-1], root).model_fields))
    template = _SENTENCES.get(item["type"])
    if template is None:
        return str(item["msg"])
    return template.format(input=_shown(item["input"]), **item.get("ctx", {}))


def _shown(value: object) -> object:
    """A long text is shown by its beginning."""
    return value[:MOST_SHOWN] + "…" if isinstance(value, str) and len(value) > MOST_SHOWN else value


def _misfit(item: Any) -> KeyPath:
    """Below the block that pydantic names: the key that a relation points at."""
    error = item.get("ctx", {}).get("error")
    return tuple(error.key.split(".")) if isinstance(error, Misfit) else ()


def _key_path(loc: tuple[int | str, ...], root: type[BaseModel]) -> KeyPath:
    """The part of pydantic's location that are keys of the file; the rest names branches of unions."""
    model: type[BaseModel] | None = root
    path: list[int | str] = []
    for part in loc:
        if part == "[key]":  # pydantic complains of the key before it
            break
        if path and model is None and not isinstance(part, int):
            break
        path.append(part)
        if model is not None:
            model = _next_model(model, part, path)
    return tuple(path)


def _next_model(model: type[BaseModel], part: int | str, path: list[int | str]) -> type[BaseModel] | None:
    if path == ["roles"]:
        return model  # the next part is a role's name
    if len(path) == 2 and path[0] == "roles":
        return _block_of(model.model_fields["roles"].annotation)
    field = model.model_fields.get(str(part))
    return _block_of(field.annotation) if field else None


def _model_at(path: KeyPath, root: type[BaseModel]) -> type[BaseModel]:
    model, walked = root, list[int | str]()
    for part in path:
        walked.append(part)
        model = _next_model(model, part, walked) or model
    return model


def _block_of(annotation: Any) -> type[BaseModel] | None:
    """The block that a field's type holds, directly, as an option, or as a mapping's value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        if (found := _block_of(inner)) is not None:
            return found
    return None
