"""The JSON Schema of a flow file, for editors: events and their fields from `records.py`, faults from their table."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, get_args, get_origin

import msgspec

from nvrx_slurm.jobspec.reading import Block, keys_of
from nvrx_slurm.jobspec.schema import DIALECT, block_schema
from nvrx_slurm.lab.flow.faults import FAULTS, FaultKind
from nvrx_slurm.lab.flow.load import ClusterNeeds, FlowFile, FlowLimits
from nvrx_slurm.lab.flow.parsing import STATES
from nvrx_slurm.lab.flow.patterns import EVENTS, FIELDS

Schema = dict[str, Any]

_DURATION: Schema = {"type": ["string", "number"], "examples": ["1s", "500ms"]}
_CAPTURE: Schema = {"type": "string", "pattern": r"^\$[A-Za-z_][A-Za-z0-9_]*$"}
_ONE_EVENT: Schema = {"$ref": "#/$defs/event"}
_TRIGGER: Schema = {"$ref": "#/$defs/trigger"}
_ITEM: Schema = {"$ref": "#/$defs/expectation"}
_SEVERAL = {"type": "array", "minItems": 1}
_SCALARS = ["string", "number", "boolean", "null"]


def flow_schema() -> Schema:
    """The JSON Schema of a flow file, every key described."""
    flow = _described(FlowFile)
    keys = flow["properties"]
    items: Schema = {
        "cluster": _described(ClusterNeeds),
        "limits": _described(FlowLimits),
        "expect": {**keys["expect"], **_SEVERAL, "items": _ITEM},
        "faults": {**keys["faults"], "items": _fault()},
    }
    # An event by its name, or a mapping of its name to its fields.
    parts = {
        "event": {"anyOf": [{"enum": list(EVENTS)}, _closed(_events(), minProperties=1, maxProperties=1)]},
        "expectation": _expectation(),
        "trigger": _trigger(),
    }
    return {"$schema": DIALECT, **flow, "properties": {**keys, **items}, "$defs": parts}


@functools.cache
def _described(block: type[Block]) -> Schema:
    """Not to be changed: several faults share one."""
    return block_schema(block, {})


def _closed(properties: Mapping[str, Schema], **more: Any) -> Schema:
    return {"type": "object", "properties": dict(properties), "additionalProperties": False, **more}


# ------------------------------------------------------------------------------------------- expectations


def _events() -> dict[str, Schema]:
    return {
        event: {
            **_closed({name: _pattern(of) for name, of in FIELDS[event].items()}),
            "type": ["object", "null"],
            "description": inspect.cleandoc(kind.__doc__ or ""),
        }
        for event, kind in EVENTS.items()
    }


def _pattern(kind: Any) -> Schema:
    """What may stand for a field of this type."""
    origins = {get_origin(option) for option in (kind, *get_args(kind))}
    if tuple in origins:
        return {"type": ["array", "string", "object"]}
    is_mapping = dict in origins or (isinstance(kind, type) and issubclass(kind, msgspec.Struct))
    return {"type": ["object", "string"]} if is_mapping else {"type": _SCALARS}


def _expectation() -> Schema:
    branches: Schema = {**_SEVERAL, "items": {"anyOf": [_ITEM, {"type": "array", "items": _ITEM}]}}
    forms: dict[str, Schema] = {
        "any_order": {**branches, "description": "Branches side by side; each an item, or a list of them."},
        "eventually": {**_ONE_EVENT, "description": "Somewhere from here on; what follows does not wait for it."},
        "never": {**_ONE_EVENT, "description": "Not from here until `until`, or to the end."},
        "count": {**_ONE_EVENT, "description": "How often it comes from here until `until`, or to the end: `is`."},
        "within": {**_DURATION, "description": "How long after what came before, or after the last fault."},
        "until": {**_ONE_EVENT, "description": "Where a `never` or `count` ends."},
        "is": {"type": ["integer", "string"], "examples": [3, ">= 2"]},
    }
    return {"anyOf": [{"enum": list(EVENTS)}, _closed({**_events(), **forms}, minProperties=1)]}


# ------------------------------------------------------------------------------------------------- faults


def _fault() -> Schema:
    named: Schema = {**_CAPTURE, "description": "Names the node (for a fault of a worker: the rank) that was hit."}
    return _closed({"when": _TRIGGER, "do": _do(), "as": named}, required=["when", "do"])


def _trigger() -> Schema:
    fields: dict[str, Schema] = {name: {} for event in EVENTS for name in FIELDS[event]}
    several: Schema = {**_SEVERAL, "items": _TRIGGER}
    forms: dict[str, Schema] = {
        "event": {"enum": list(EVENTS), "description": "An entry of the journal; its fields stand beside it."},
        "times": {"type": "integer", "minimum": 1, "description": "Which of such entries, counted from 1."},
        "state": {"enum": list(STATES), "description": "The job's first moment in this state."},
        "fault": {"type": "integer", "minimum": 1, "description": "Once the fault with this number has happened."},
        "all": {**several, "description": "Once all of these have come."},
        "any": {**several, "description": "Once the first of these has come."},
        "after": {**_DURATION, "description": "How much later than that."},
    }
    return _closed({**fields, **forms}, minProperties=1)


def _do() -> Schema:
    faults = {name: {**_arguments(kind), "description": kind.about} for name, kind in FAULTS.items()}
    return {"anyOf": [{"enum": list(FAULTS)}, _closed(faults, minProperties=1, maxProperties=1)]}


def _arguments(kind: FaultKind) -> Schema:
    options: list[Schema] = [_described(kind.arguments)]
    if kind.arguments.short is not None:
        options.append({"type": ["string", "integer"]})
    if not any(key.is_required for key in keys_of(kind.arguments).values()):
        options.append({"type": "null"})
    return {"anyOf": options}
