"""The wheel alone, with the packages that the core requires and no extra: what a compute node needs works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ci.dist import IN_WHEEL, problems, strangers
from nvrx_slurm.agent.supervisor import descendants
from tests.harness import wait_gone

ROOT = Path(__file__).parents[2]
FLOWS = str(ROOT / "ci" / "flows" / "cancelled.yaml")
EXTRAS = {
    "hyperscan",
    "jinja2",
    "junitparser",
    "lupa",
    "submitit",
    "mcp",
    "starlette",
    "uvicorn",
    "httpx2",
}
JOB = """\
name: installed
command: python -c "import time; print('worked')"
nodes: 2
"""


def required(requirements: Iterable[str], extras: frozenset[str] = frozenset()) -> Iterator[str]:
    """The packages that these requirements name, and those that they need in turn."""
    for requirement in map(Requirement, requirements):
        if any(requirement.marker is None or requirement.marker.evaluate({"extra": e}) for e in extras or {""}):
            yield canonicalize_name(requirement.name)
            needed = metadata.distribution(requirement.name).requires or ()
            yield from required(needed, frozenset(requirement.extras))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([sys.executable, "-m", *build], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `nvrx-slurm` of a new environment. The core's packages are links to those of the tests' own environment, so
    that no package index is needed."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    (site,) = (folder / "lib").glob("python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name in {*required(core)}:
        for file in metadata.distribution(name).files or ():
            link = site / file.parts[0]
            if file.parts[0] != ".." and not link.exists():
                link.symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / file.parts[0])
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], check=True)
    return folder / "bin" / "nvrx-slurm"


def call(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{installed.parent}:{os.environ['PATH']}",  # as with the environment activated: `python` is its own
        "XDG_CACHE_HOME": str(folder / "cache"),
        "NO_COLOR": "1",
    }
    return subprocess.run(
        [installed, *arguments], capture_output=True, text=True, cwd=folder, env=environment, timeout=100
    )


def test_no_extra_is_installed(installed: Path) -> None:
    """The environment has the packages that the core requires, and none of the extras' packages."""
    code = f"import importlib.util as u; print([n for n in {sorted(EXTRAS)} if u.find_spec(n)])"
    done = subprocess.run([installed.with_name("python"), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_job_from_init_to_status(installed: Path, tmp_path: Path) -> None:
    """`init`, `render`, `run`, `status`, `logs` and `analyze` need no extra."""
    assert call(installed, tmp_path, "init", "first.yaml").returncode == 0
    (tmp_path / "job.yaml").write_text(JOB)
    assert "#SBATCH --nodes=2" in call(installed, tmp_path, "render", "job.yaml").stdout
    ran = call(installed, tmp_path, "run", "job.yaml")
    assert ran.returncode == 0, ran.stderr
    status = call(installed, tmp_path, "status")
    assert (status.returncode, "installed" in status.stdout) == (0, True), status.stderr


def test_the_demo_ends_with_the_same_result_with_and_without_a_death(installed: Path, tmp_path: Path) -> None:
    """`nvrx-slurm demo` from beginning to end: a node is killed, every bit of the result is the same, and only the
    page of the job is kept."""
    done = subprocess.run(
        [installed, "demo"], env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same, bit for bit" in done.stdout
    assert "n2 was lost: connection to its agent closed" in done.stdout
    assert "workers warm" in done.stdout
    [page] = tmp_path.iterdir()
    assert done.stdout.splitlines()[-1].split() == ["the", "job", "on", "one", "page", str(page)]
    assert b"Where the time went" in page.read_bytes()


def test_an_interrupted_demo_leaves_nothing(installed: Path, tmp_path: Path) -> None:
    """Ctrl-C during the training: the demo exits with 130, without a traceback, and leaves no process and no file."""
    demo = subprocess.Popen(
        [installed, "demo"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout is not None
    assert any("starting" in line for line in demo.stdout)
    started = descendants(demo.pid)
    demo.send_signal(signal.SIGINT)
    _, errors = demo.communicate(timeout=60)
    assert (demo.returncode, errors.strip()) == (130, "")
    wait_gone(started)
    assert not [*tmp_path.iterdir()]


def test_logs_are_judged_without_vectorscan(installed: Path, tmp_path: Path) -> None:
    """`analyze` finds a cause, and one line says that Python searches for the rules."""
    (tmp_path / "rank0.log").write_text(
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
    )
    done = call(installed, tmp_path, "analyze", "rank0.log")
    assert done.returncode == 0, done.stderr
    assert "memory" in done.stdout
    assert done.stderr.count("rules are searched for by Python, slowly") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["ci", "run", FLOWS, "--on", "local", "--junit", "a.xml"], "--junit needs the package junitparser"),
        (["ci", "run", FLOWS, "--on", "local", "--html", "a.html"], "--html needs the package jinja2"),
        (["ci", "simulate", "--seeds", "1"], "ci simulate needs the package lupa"),
        (["attrsvc", "--root", "."], "attrsvc needs the package starlette"),
    ],
)
def test_what_needs_an_extra_names_it(installed: Path, tmp_path: Path, arguments: list[str], line: str) -> None:
    """One line names the package and the command that installs it; the exit code says that the call is wrong."""
    done = call(installed, tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert line in done.stderr
    assert "pip install 'nvrx-slurm[" in done.stderr


def test_the_wheel_holds_the_package_alone(wheel: Path) -> None:
    """Nothing of the tests, the flows or the benchmarks is installed."""
    assert problems(wheel.parent) == [f"{wheel.parent} holds 1 wheels and 0 sdists, and not one of each"]
    assert strangers(["nvrx_slurm/a.py", "tests/b.py", "nvrx_slurm/c.so"], IN_WHEEL) == [
        "tests/b.py",
        "nvrx_slurm/c.so",
    ]
