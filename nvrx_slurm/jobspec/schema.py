"""The model as a JSON Schema, for editors and for people."""

from __future__ import annotations

import inspect
from typing import Any, Literal

from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.jobspec.reading import Block, ValueRule, as_written, block_in, keys_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def job_schema() -> Schema:
    """The JSON Schema of job.yaml, every key described."""
    parts: dict[str, Schema] = {}
    top = block_schema(JobSpec, parts)
    return {"$schema": DIALECT, "$defs": parts, **top}


def block_schema(block: type[Block], parts: dict[str, Schema]) -> Schema:
    """The schema of one block; those of the blocks in it are added to `parts`, to which it refers."""
    properties: dict[str, Schema] = {}
    for name, key in keys_of(block).items():
        said = _rule_schema(key.rule, parts)
        if key.rule.about is not None:
            said["description"] = key.rule.about
        if not key.is_required:
            said["default"] = as_written(key.rule, key.default)
        properties[name] = said
    required = [name for name, key in keys_of(block).items() if key.is_required]
    schema = {
        "type": "object",
        "description": inspect.cleandoc(block.__doc__ or ""),
        "properties": properties,
        "additionalProperties": False,
    }
    return schema | ({"required": required} if required else {})


def _rule_schema(rule: ValueRule, parts: dict[str, Schema]) -> Schema:
    inner = block_in(rule)
    if inner is not None and inner.__name__ not in parts:
        parts[inner.__name__] = {}  # first its place, since a block may hold itself
        parts[inner.__name__] |= block_schema(inner, parts)
    said: Schema
    if rule.schema is not None:
        said = dict(rule.schema)
    elif rule.kind is inner and inner is not None:
        said = {"$ref": f"#/$defs/{inner.__name__}"}
    elif rule.kind is dict:
        said = {"type": "object", "additionalProperties": _rule_schema(rule.inner[1], parts) or True}
    elif rule.kind is tuple:
        said = {"type": "array", "items": _rule_schema(rule.inner[0], parts)}
    elif rule.kind is Literal:
        said = {"type": "string", "enum": list(rule.choices)}
    else:
        said = {"type": _TYPES[rule.kind]} if rule.kind in _TYPES else {}
        bounds = {"minimum": rule.least, "maximum": rule.most}
        said |= {key: bound for key, bound in bounds.items() if bound is not None}
    return {"anyOf": [said, {"type": "null"}]} if rule.is_optional else said
