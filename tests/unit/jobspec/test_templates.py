"""The templates that `init` writes."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

import pytest

from nvrx_slurm.jobspec import reading
from nvrx_slurm.jobspec.load import load
from nvrx_slurm.jobspec.model import FaultToleranceSpec, JobSpec, RetentionSpec, RoleSpec
from nvrx_slurm.jobspec.reading import Block, written
from nvrx_slurm.jobspec.schema import job_schema

TEMPLATES = resources.files("nvrx_slurm.jobspec") / "templates"
COMMENTED = re.compile(r"^( *)# ( *)(?=[\w-]+:|- )", re.MULTILINE)


def text_of(name: str) -> str:
    return (TEMPLATES / f"{name}.yaml").read_text()


def keys_of(block: type[Block]) -> set[str]:
    """The block's keys and those of the blocks in it, without the keys of a role."""
    keys: set[str] = set()
    for name, key in reading.keys_of(block).items():
        keys.add(name)
        if isinstance(key.default, Block):
            keys |= keys_of(type(key.default))
    return keys


def mentioned(text: str) -> set[str]:
    return set(re.findall(r"^[ #]*([a-z_]+):", text, re.MULTILINE))


@pytest.mark.parametrize("name", ["plain", "roles"])
def test_a_template_loads(name: str, tmp_path: Path) -> None:
    """The template that `init` writes is a valid job, unchanged."""
    path = tmp_path / "job.yaml"
    path.write_text(text_of(name))
    assert load(path).spec.name


@pytest.mark.parametrize("name", ["plain", "roles"])
def test_a_template_loads_with_all_its_comments_taken_off(name: str, tmp_path: Path) -> None:
    """Every commented key is valid at its place, with the value shown."""
    path = tmp_path / "job.yaml"
    path.write_text(COMMENTED.sub(r"\1\2", text_of(name)))
    spec = load(path).spec
    if name == "plain":
        assert (spec.slurm.segment, spec.slurm.extra, spec.env) == (
            16,
            {"comment": "first try"},
            {"OMP_NUM_THREADS": "8"},
        )
        assert spec.store.url == "rediss://valkey.example:6380/0"


def test_the_plain_template_has_every_key() -> None:
    """The template has every key of a plain job, so that the user need not look elsewhere. `retention` belongs in the
    site file."""
    assert keys_of(JobSpec) - {"roles", "retention"} - keys_of(RetentionSpec) <= mentioned(text_of("plain"))


def test_the_roles_template_has_every_key_of_a_role() -> None:
    """The template has every key of a role, so that the user need not look elsewhere."""
    assert {*keys_of(RoleSpec), "roles"} <= mentioned(text_of("roles"))


def test_the_values_that_the_templates_show_as_defaults_are_the_defaults() -> None:
    """The commented-out bounds of the plain template have the default values."""
    bounds = written(FaultToleranceSpec())
    for block, values in bounds.items():
        for key, value in values.items() if isinstance(values, dict) else [(block, values)]:
            if value in (None, []):  # the template shows an example for a key that is empty by default
                continue
            shown = value if isinstance(value, str) else json.dumps(value)
            assert re.search(rf"\b{key}: {shown}\b", text_of("plain")), key


def test_the_schema_describes_every_key() -> None:
    """An editor shows a description for each key, and marks an unknown key."""
    schema = job_schema()
    for name, part in {"JobSpec": schema, **schema["$defs"]}.items():
        assert part["additionalProperties"] is False, name
        for key, value in part["properties"].items():
            assert "description" in value or "$ref" in value or key in ("store", "backoff"), f"{name}.{key}"


def test_the_schema_knows_every_key_of_the_templates() -> None:
    """The schema has every key of the templates, with a type that fits."""
    schema = job_schema()
    assert mentioned(text_of("plain")) <= all_properties(schema) | {"comment", "OMP_NUM_THREADS"}
    assert schema["required"] == ["name"]
    assert schema["properties"]["command"]["anyOf"][0]["type"] == ["string", "array"]
    assert schema["$defs"]["RoleSpec"]["required"] == ["command"]


def all_properties(schema: dict) -> set[str]:
    return {key for part in (schema, *schema["$defs"].values()) for key in part["properties"]}
