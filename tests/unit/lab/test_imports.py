"""Modules that run jobs do not import the lab, and the lab's extra packages are imported only where needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = "import runpy, sys; runpy.run_module('nvrx_slurm', run_name='__main__', alter_sys=True)"
EXTRA = ("jinja2", "markupsafe", "junitparser", "pytest")
FLOW = Path(__file__).parents[3] / "ci" / "flows" / "happy-path.yaml"


@pytest.mark.parametrize(
    "module",
    [
        "agent.__main__",
        "agent.supervisor",
        "batch.__main__",
        "controller.__main__",
        "workload",
        "inprocess",
        "transport",
    ],
)
def test_what_runs_on_compute_nodes_imports_nothing_of_the_lab(module: str) -> None:
    """Agent, batch host, controller and worker run where the package is installed without its extras."""
    code = f"import sys, nvrx_slurm.{module}; print(*(name for name in sys.modules if 'nvrx_slurm.lab' in name))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def without_the_extra(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `nvrx-slurm ci …` where the packages of the extra `ci` cannot be imported."""
    code = f"import sys; sys.modules.update(dict.fromkeys({EXTRA!r})); sys.argv[1:] = {arguments!r}; {RUN}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [("ci", "check", str(FLOW)), ("ci", "schema"), ("ci", "run", "--help")])
def test_ci_runs_without_its_extra(arguments: tuple[str, ...]) -> None:
    """Only the reports and the pytest plugin need other packages."""
    done = without_the_extra(*arguments)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("option", "package"), [("--junit", "junitparser"), ("--html", "jinja2")])
def test_a_report_without_its_package_is_one_clear_error(tmp_path: Path, option: str, package: str) -> None:
    """The error names the option, the package and what to install, before any flow has run."""
    done = without_the_extra("ci", "run", str(FLOW), "--on", "local", option, str(tmp_path / "report"))
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode != 0
    assert all(word in line for word in (option, package, "pip install 'nvrx-slurm[ci]'"))
