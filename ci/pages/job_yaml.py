"""docs/job-yaml.md: the keys of each block, their values and defaults, from the model."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

from nvrx_slurm.jobspec.deprecated import KEPT_UNTIL, SINCE
from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.jobspec.reading import Block, Key, ValueRule, as_written, block_in, keys_of
from nvrx_slurm.jobspec.schema import block_schema
from nvrx_slurm.jobspec.values import (
    LARGEST_BYTES,
    LONGEST_S,
    RESERVED_VARIABLES,
    SHORTEST_S,
    SIGNALS,
    SMALLEST_BYTES,
    size_words,
)
from nvrx_slurm.util.durations import words


def sections(block: type[Block] = JobSpec, path: str = "") -> Iterator[tuple[str, type[Block]]]:
    """Each block of job.yaml behind the path of its keys: itself, and then those in it."""
    yield path, block
    for name, key in keys_of(block).items():
        inner = block_in(key.rule)
        # What a role shares with the job (`container`, `prewarm`) has its section at the job.
        if inner is not None and not path.startswith("roles"):
            yield from sections(inner, f"{path}.{name}".lstrip(".") + (".<name>" if key.rule.kind is dict else ""))


def parts() -> dict[str, str]:
    """The parts of the page."""
    examples = [_example("The plain form", "plain.yaml"), _example("The form with roles", "roles.yaml")]
    blocks = []
    for path, block in sections():
        properties = block_schema(block, {})["properties"]
        rows = [
            f"| `{name}` | {_kind(key.rule, properties[name])} | {_default(key)} | {key.rule.about or 'See below.'} |"
            for name, key in keys_of(block).items()
        ]
        head = ["| key | value | default | |", "|---|---|---|---|"]
        about = inspect.cleandoc(block.__doc__ or "")
        title = f"`{path}`" if path else "The top level"
        blocks.append("\n".join([f"## {title}", "", about, "", *head, *rows, ""]))
    return {
        "examples": "\n".join(examples),
        "keys": "\n".join(blocks),
        "shortest": words(SHORTEST_S),
        "longest": words(LONGEST_S),
        "smallest": size_words(SMALLEST_BYTES),
        "largest": size_words(LARGEST_BYTES),
        "signals": ", ".join(f"`{name}`" for name in SIGNALS),
        "reserved": ", ".join(f"`{name}`" for name in sorted(RESERVED_VARIABLES)),
        "since": SINCE,
        "kept-until": KEPT_UNTIL,
    }


def _example(title: str, template: str) -> str:
    text = (resources.files("nvrx_slurm.jobspec") / "templates" / template).read_text()
    return f"## {title}\n\n```yaml\n{text}```\n"


def _kind(rule: ValueRule, part: dict[str, Any]) -> str:
    """What may stand there, in words. `part`: its JSON Schema."""
    if block_in(rule) is not None or rule.kind is dict:
        return "mapping"
    option = next(option for option in part.get("anyOf", [part]) if option.get("type") != "null")
    if "enum" in option:
        return " or ".join(f"`{value}`" for value in option["enum"])
    if "examples" in option:
        return "like " + ", ".join(f"`{example}`" for example in option["examples"])
    types = option["type"] if isinstance(option["type"], list) else [option["type"]]
    if "array" in types:
        return "text or list"
    if types == ["boolean"]:
        return "`true` or `false`"
    if types in (["integer"], ["number"]):
        return f"{option['minimum']:,} to {option['maximum']:,}"
    return "text"


def _default(key: Key) -> str:
    """The default as job.yaml would hold it, or empty."""
    if key.is_required:
        return "required"
    value = as_written(key.rule, key.default)
    said = value not in (None, [], {}) and not isinstance(value, dict)
    return f"`{value if isinstance(value, str) else json.dumps(value)}`" if said else ""
