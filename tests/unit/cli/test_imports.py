"""What the command line loads, and when."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

HEAVY = {"redis", "prometheus_client", "pydantic", "submitit", "jinja2", "rich", "msgspec", "ruamel", "asyncio"}
COMMANDS = [
    "init", "render", "config", "completion", "dump", "status", "nodes", "nodes suspect", "transport",
    "transport doctor", "ci", "ci run", "report", "trace", "top", "metrics",
]  # fmt: skip


def imported(*arguments: str) -> set[str]:
    """The top-level packages that a run of `python -m nvrx_slurm` imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "nvrx_slurm", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout
    return {match[1] for match in re.finditer(r"\| +(\w+)[\w.]*$", done.stderr, re.MULTILINE)}


def test_help_imports_nothing_heavy() -> None:
    """`--help` answers at once, since it loads only click and a table of commands."""
    found = imported("--help")
    assert {"click", "nvrx_slurm"} <= found
    assert not found & HEAVY


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_imports_nothing_heavy(command: str) -> None:
    """A command loads what it needs when it runs, not for its help."""
    assert not imported(*command.split(), "--help") & HEAVY


def test_init_imports_nothing_heavy(tmp_path_factory: pytest.TempPathFactory) -> None:
    """`init` only copies a file."""
    path = tmp_path_factory.mktemp("init") / "job.yaml"
    assert not imported("init", str(path)) & HEAVY


def test_render_starts_no_client(tmp_path_factory: pytest.TempPathFactory) -> None:
    """`render` contacts no server, and loads no client."""
    path = tmp_path_factory.mktemp("render") / "job.yaml"
    path.write_text("name: a\ncommand: x\n")
    found = imported("render", str(path), "--folder", str(path.parent / "jobs"))
    assert {"msgspec", "ruamel"} <= found
    assert not found & {"redis", "jinja2", "submitit", "rich", "pydantic"}
