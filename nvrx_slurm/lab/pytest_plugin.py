"""The pytest plugin: a real Slurm, jobs and flows as fixtures. `docs/pytest.md` describes its use.

pytest loads this module in every run of an environment that has nvrx-slurm installed: so it imports nothing but
pytest, and does nothing for a test that does not ask.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from nvrx_slurm.lab.devcluster import DevCluster
    from nvrx_slurm.lab.flow.model import StageName
    from nvrx_slurm.lab.flow.outcome import FlowAttempt
    from nvrx_slurm.lab.pytest_fixtures import Jobs, PytestSession

DEFAULT_NODES = 4
MARKER = "slurm(nodes=4): needs the programs of Slurm; `slurm_cluster` has at least so many nodes"
TIMEOUT = "how long a test may keep a job, such as 10m; then stacks of all its processes are shown, and its jobs end"

_nodes = pytest.StashKey[int]()
_jobs = pytest.StashKey["Jobs"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("nvrx_slurm_timeout", TIMEOUT, default="10m")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


@pytest.hookimpl(trylast=True)  # after -k and -m: a test that is not run wants no cluster
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One cluster serves the whole session: it is as large as its largest test wants it."""
    wrong = []
    for test, mark in [(item, mark) for item in items for mark in item.iter_markers("slurm")]:
        given = {**dict(zip(("nodes",), mark.args, strict=False)), **mark.kwargs}
        nodes = given.pop("nodes", DEFAULT_NODES)
        if given or len(mark.args) > 1 or not isinstance(nodes, int) or nodes < 1:
            wrong.append(f"{test.nodeid}: slurm(nodes=N) wants a number of nodes from 1 on, not {mark}")
        else:
            config.stash[_nodes] = max(nodes, config.stash.get(_nodes, 1))
    if wrong:
        raise pytest.UsageError(*wrong)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slurm"):
        _need_slurm()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails shows how its jobs ended; one that ran out of time, what they were doing."""
    jobs = item.stash.get(_jobs, None)
    if jobs is not None and call.when != "teardown" and call.excinfo:
        jobs.show_ends()
        # pytest-timeout fails a test by a message; this package, asyncio and subprocess have errors for it.
        error = call.excinfo.value
        if "Timeout" in type(error).__name__ or str(error).startswith("Timeout"):
            jobs.show_stacks()
    return (yield)


@pytest.fixture(scope="session")
def _nvrx_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PytestSession]:
    """If this process is killed, the guard of its folder ends what it has started."""
    from nvrx_slurm.lab.pytest_fixtures import PytestSession

    session = PytestSession(tmp_path_factory.mktemp("nvrx-slurm"))
    yield session
    session.close()


@pytest.fixture(scope="session")
def slurm_cluster(request: pytest.FixtureRequest) -> Iterator[DevCluster]:
    """A real Slurm on this machine, without root, for the whole session (with pytest-xdist: of each worker process).

    It has as many nodes as the largest `@pytest.mark.slurm(nodes=…)` wants, each of four CPUs. Children find it with
    `slurm_cluster.environment()`. A test that breaks a node restores it, or calls `slurm_cluster.heal()`.
    """
    _need_slurm()
    session: PytestSession = request.getfixturevalue("_nvrx_session")
    with session.cluster(request.config.stash.get(_nodes, DEFAULT_NODES)) as cluster:
        yield cluster


@pytest.fixture
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    """Submits jobs: `job("job.yaml", spares=1)` or `job({"command": …, "nodes": 2})` → `nvrx_slurm.Job`.

    In a test that is marked `slurm` to `slurm_cluster`, else to this machine. A relative path counts from the test's
    file. After the test every job is ended, with all its processes.
    """
    from nvrx_slurm.util.durations import parse_duration

    session: PytestSession = request.getfixturevalue("_nvrx_session")
    cluster = request.getfixturevalue("slurm_cluster") if _is_marked(request) else None
    bound_s = parse_duration(request.config.getini("nvrx_slurm_timeout"))
    jobs = session.jobs(request.node, here=request.path.parent, cluster=cluster, bound_s=bound_s)
    for name, value in jobs.environment.items():
        monkeypatch.setenv(name, value)
    request.node.stash[_jobs] = jobs
    yield jobs
    jobs.close()
    if jobs.bound_passed:
        pytest.fail(f"the test's jobs were ended after {bound_s:g} s (nvrx_slurm_timeout)", pytrace=False)


@pytest.fixture
def run_flow(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., FlowAttempt]:
    """Runs a flow: `run_flow("flows/spare.yaml")`, or a mapping of a flow file's keys → `FlowAttempt`.

    In a test that is marked `slurm` on a cluster of its own, else on this machine; `on=` names another stage. Fails
    the test where the flow fails, with what was found. Relative paths count from the test's file.
    """
    from nvrx_slurm.lab.pytest_fixtures import Flows

    stage: StageName = "dev" if _is_marked(request) else "local"
    return Flows(tmp_path, here=request.path.parent, stage=stage).run


def _is_marked(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("slurm") is not None


def _need_slurm() -> None:
    """Skip where Slurm is not installed; in CI that must not pass unseen."""
    from nvrx_slurm.errors import MissingProgramError
    from nvrx_slurm.jobspec import env
    from nvrx_slurm.lab.devcluster.programs import SLURM_PROGRAMS, require

    try:
        require(SLURM_PROGRAMS)
    except MissingProgramError as error:
        if env.is_ci():
            pytest.fail(f"CI=true, and Slurm is {error}", pytrace=False)
        pytest.skip(f"Slurm is {error}")
