"""The model for people and editors: its JSON Schema, with the text that stands below each of its keys.

That text is in the model's source; reading it takes longer than loading a job does. So the model itself does without,
and this module is imported only where somebody wants to read.
"""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from nvrx_slurm.jobspec.block import Block
from nvrx_slurm.jobspec.model import JobSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def job_schema() -> dict[str, Any]:
    """The JSON Schema of job.yaml, every key described."""
    schema = JobSpec.model_json_schema()
    parts = {JobSpec.__name__: schema, **schema["$defs"]}
    for block in Block.__subclasses__():
        for key, text in descriptions(block).items():
            parts[block.__name__]["properties"][key]["description"] = text
    schema["properties"]["store"] = {"anyOf": [{"$ref": "#/$defs/StoreSpec"}, {"const": "embedded"}]}
    return {"$schema": DIALECT, **schema}


def descriptions(block: type[BaseModel]) -> dict[str, str]:
    """Key → the text below it in the block's source. A key without one is left out."""
    (body,) = ast.parse(inspect.getsource(block)).body
    assert isinstance(body, ast.ClassDef)
    return {
        key.target.id: inspect.cleandoc(text.value.value)
        for key, text in pairwise(body.body)
        if isinstance(key, ast.AnnAssign)
        and isinstance(key.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
