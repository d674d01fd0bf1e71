"""Writes a job that was described on the command line as a job.yaml."""

from __future__ import annotations

import io
import shlex
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from nvrx_slurm.errors import UsageError
from nvrx_slurm.jobspec.load import Loaded
from nvrx_slurm.jobspec.reading import written


def write_job(path: Path, loaded: Loaded) -> None:
    """A file with what the flags and the job's own file say. The environment and the site files stay where they are:
    they apply again when the file is read. Raises UsageError where the file exists or cannot be written."""
    said: dict[str, Any] = {}
    whole = written(loaded.spec)
    for layer in (loaded.layers[2], loaded.layers[0]):  # flags, environment, job.yaml, site files
        _pick(said, layer.data, whole)
    document = {key: said[key] for key in whole if key in said}  # in the order of the model
    for block in (document, *document.get("roles", {}).values()):
        if "command" in block:
            block["command"] = shlex.join(block["command"])
    yaml = YAML()
    yaml.width = 1_000_000  # no value is folded
    text = io.StringIO()
    yaml.dump(document, text)
    try:
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
