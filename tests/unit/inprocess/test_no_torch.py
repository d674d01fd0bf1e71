from __future__ import annotations

import json
import pkgutil
import subprocess
import sys

import pytest

import nvrx_slurm.inprocess

HEAVY = {"torch", "click", "submitit", "redis", "pynvml", "numpy"}
LIGHT = [
    "abort",
    "completion",
    "compose",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "rank_assignment",
    "rank_filter",
    "state",
    "terminate",
]


def loaded_by(*modules: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after importing these."""
    code = (
        f"import json, sys, {', '.join(modules)}; print(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(ran.stdout))


def test_the_package_loads_nothing_heavy():
    """`import nvrx_slurm.inprocess` loads neither torch nor redis nor a module of the command line."""
    assert not loaded_by("nvrx_slurm.inprocess") & HEAVY


@pytest.mark.parametrize("name", LIGHT)
def test_no_component_loads_anything_heavy(name: str):
    """Each component module is imported alone, so that no import by another one hides it."""
    assert not loaded_by(f"nvrx_slurm.inprocess.{name}") & HEAVY


def test_nothing_of_the_wrapper_needs_torch():
    """All modules of the wrapper together, with stores and monitor, load neither torch nor NVML."""
    modules = pkgutil.iter_modules(nvrx_slurm.inprocess.__path__, "nvrx_slurm.inprocess.")
    names = [module.name for module in modules]
    assert len(names) > 30
    assert not loaded_by(*names) & {"torch", "pynvml", "click", "submitit"}
