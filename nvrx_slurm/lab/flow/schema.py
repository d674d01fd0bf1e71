"""The JSON Schema of a flow file, for editors: events and their fields from `records.py`, faults from their table."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from nvrx_slurm.jobspec.reading import Block, keys_of
from nvrx_slurm.jobspec.schema import DIALECT, block_schema
from nvrx_slurm.journal.records import RENAMED_EVENTS
from nvrx_slurm.lab.flow.faults import FAULTS
from nvrx_slurm.lab.flow.load import ClusterNeeds, FlowFile, FlowLimits
from nvrx_slurm.lab.flow.parsing import STATES, option_of, record_of
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
    events = _events()
    named: Schema = {**_CAPTURE, "description": "Names the node (for a fault of a worker: the rank) that was hit."}
    does = [{"enum": list(FAULTS)}, _closed(_faults(), minProperties=1, maxProperties=1)]
    fault = _closed({"when": _TRIGGER, "do": {"anyOf": does}, "as": named}, required=["when", "do"])
    items: Schema = {
        "cluster": _described(ClusterNeeds),
        "limits": _described(FlowLimits),
        "expect": {**keys["expect"], **_SEVERAL, "items": _ITEM},
        "faults": {**keys["faults"], "items": fault},
    }

    branches: Schema = {**_SEVERAL, "items": {"anyOf": [_ITEM, {"type": "array", "items": _ITEM}]}}
    expected: dict[str, Schema] = {
        "any_order": {**branches, "description": "Branches side by side; each an item, or a list of them."},
        "eventually": {**_ONE_EVENT, "description": "Somewhere from here on; what follows does not wait for it."},
        "never": {**_ONE_EVENT, "description": "Not from here until `until`, or to the end."},
        "count": {**_ONE_EVENT, "description": "How often it comes from here until `until`, or to the end: `is`."},
        "within": {**_DURATION, "description": "How long after what came before, or after the last fault."},
        "until": {**_ONE_EVENT, "description": "Where a `never` or `count` ends."},
        "is": {"type": ["integer", "string"], "examples": [3, ">= 2"]},
    }
    several: Schema = {**_SEVERAL, "items": _TRIGGER}
    triggers: dict[str, Schema] = {
        # The fields of events come first: a key of the trigger itself replaces a field of its name, such as `times`.
        **{name: {} for event in EVENTS for name in FIELDS[event]},
        "event": {"enum": list(events), "description": "An entry of the journal; its fields stand beside it."},
        "times": {"type": "integer", "minimum": 1, "description": "Which of such entries, counted from 1."},
        "state": {"enum": list(STATES), "description": "The job's first moment in this state."},
        "fault": {"type": "integer", "minimum": 1, "description": "Once the fault with this number has happened."},
        "all": {**several, "description": "Once all of these are met."},
        "any": {**several, "description": "Once the first of these is met."},
        "after": {**_DURATION, "description": "How much later than that."},
    }
    parts = {
        # An event by its name, or a mapping of its name to its fields.
        "event": {"anyOf": [{"enum": list(events)}, _closed(events, minProperties=1, maxProperties=1)]},
        "expectation": {"anyOf": [{"enum": list(events)}, _closed({**events, **expected}, minProperties=1)]},
        "trigger": _closed(triggers, minProperties=1),
    }
    return {"$schema": DIALECT, **flow, "properties": {**keys, **items}, "$defs": parts}


@functools.cache
def _described(block: type[Block]) -> Schema:
    """Not to be changed: several faults share one."""
    return block_schema(block, {})


def _closed(properties: Mapping[str, Schema], **more: Any) -> Schema:
    return {"type": "object", "properties": dict(properties), "additionalProperties": False, **more}


def _events() -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for event, record in EVENTS.items():
        fields: dict[str, Schema] = {}
        for name, kind in FIELDS[event].items():  # what may stand for a field of this type
            if option_of(kind, tuple):
                types = ["array", "string", "object"]
            elif option_of(kind, dict) or record_of(kind):
                types = ["object", "string"]
            else:
                types = _SCALARS
            fields[name] = {"type": types}
        about = inspect.cleandoc(record.__doc__ or "")
        found[event] = {**_closed(fields), "type": ["object", "null"], "description": about}
    # Flows written before 0.2 may have these names.
    return found | {old: {**found[now], "deprecated": True} for old, now in RENAMED_EVENTS.items()}


def _faults() -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for name, kind in FAULTS.items():
        options: list[Schema] = [_described(kind.arguments)]
        if kind.arguments.short is not None:
            options.append({"type": ["string", "integer"]})
        if not any(key.is_required for key in keys_of(kind.arguments).values()):
            options.append({"type": "null"})
        found[name] = {"anyOf": options, "description": kind.about}
    return found
