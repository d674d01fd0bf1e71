"""The pytest plugin in a user's repository: real jobs, a real Slurm, and what is left of them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.lab.devcluster import names
from nvrx_slurm.lab.devcluster.processes import environment_of, read_table
from nvrx_slurm.lab.flow.cleanup import MARK
from tests.waiting import until

pytest_plugins = ["pytester"]

FOREVER = "[sh, -c, 'while :; do read _ || exec tail -f /dev/null; done']"
JOB_YAML = f"name: theirs\ncommand: {FOREVER}\nworkers_per_node: 2\nfault_tolerance: {{teardown: {{grace: 1s}}}}\n"
PASSING = """
job: job.yaml
overrides: {spares: 1}
faults:
  - when: {all: [{event: node_joined, times: 2}, {state: running}]}
    do: {kill_worker: 1}
expect:
  - restart_decided: {rank: 1}
  - recovered: {cycle: 1}
"""


@pytest.fixture
def theirs(pytester: pytest.Pytester) -> pytest.Pytester:
    """A user's repository with a job.yaml, and no settings of nvrx-slurm."""
    pytester.makefile(".yaml", job=JOB_YAML)
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider -p no:asyncio --strict-markers -W error\n")
    return pytester


def run(theirs: pytest.Pytester, test: str, *flags: str) -> pytest.RunResult:
    theirs.makepyfile(test_theirs=test)
    return theirs.runpytest_subprocess("-q", *flags, timeout=100)


def of(folder: Path) -> list[int]:
    """The processes of jobs that tests of this repository have started."""
    return [pid for pid in read_table() if environment_of(pid).get(MARK, "").startswith(str(folder))]


def test_tests_that_do_not_use_the_plugin_load_nothing(theirs):
    """A run of tests that do not use the plugin loads nothing but the plugin's own module."""
    run(
        theirs,
        """
        import sys

        def test_nothing():
            heavy = {"pydantic", "redis", "submitit", "click", "msgspec", "ruamel", "asyncio.base_events"}
            assert "nvrx_slurm.lab.pytest_plugin" in sys.modules
            assert not {name for name in sys.modules if name.startswith("nvrx_slurm.")} - {
                "nvrx_slurm.lab", "nvrx_slurm.lab.pytest_plugin"
            }
        """,
    ).assert_outcomes(passed=1)


def test_jobs_on_this_machine(theirs):
    """Jobs are submitted from a file or from a mapping, and run. What a test leaves running ends with the test."""
    run(
        theirs,
        """
        import pytest

        def test_to_its_end(job):
            done = job({"command": ["sh", "-c", "echo rank $RANK"], "workers_per_node": 2}, spares=1)
            assert done.wait(60) == 0
            assert done.logs(rank=1) == "rank 1\\n"

        def test_that_leaves_one(job):
            running = job("job.yaml", fault_tolerance__max_restarts=0)
            next(entry for entry in running.events(follow=True) if "WorkersStarted" in repr(entry.record))
        """,
        f"--basetemp={theirs.path / 'base'}",
    ).assert_outcomes(passed=2)
    assert of(theirs.path) == []


def test_failed_test_shows_how_its_job_ended(theirs):
    """The report has the job's error and an `explain` command: with an exit code alone, its reader would have to
    search a folder below /tmp."""
    result = run(
        theirs,
        """
        def test_it(job):
            command = ["python3", "-c", "raise KeyError('lr')"]
            assert job({"command": command}, fault_tolerance__max_restarts=0).wait(60) == 0
        """,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*KeyError: 'lr'*", "*nvrx-slurm explain *"])


@pytest.mark.slurm
def test_jobs_on_a_slurm(theirs):
    """Marked tests share one Slurm with as many nodes as the largest of them needs, and their jobs run there."""
    run(
        theirs,
        """
        import subprocess
        import pytest

        @pytest.mark.slurm(nodes=5)
        def test_size(slurm_cluster):
            assert len(slurm_cluster.nodes) == 5

        @pytest.mark.slurm
        def test_job(job):
            there = job({"command": "hostname"}, nodes=2)
            assert there.cluster == "slurm"
            assert there.wait(60) == 0
            assert there.job_id in subprocess.check_output(["squeue", "--states=all"], text=True)
        """,
        f"--basetemp={theirs.path / 'base'}",
    ).assert_outcomes(passed=2)
    assert of(theirs.path) == []


def test_flows(theirs):
    """A flow that passes returns its faults and recoveries. A flow that fails, fails its test with the finding and
    its line."""
    theirs.makefile(
        ".yaml", survives=PASSING, wishes=PASSING.replace("cycle: 1", "cycle: 2") + "limits: {wall: 15s}\n"
    )
    result = run(
        theirs,
        """
        import pytest
        from nvrx_slurm.errors import UsageError

        def test_that_passes(run_flow):
            attempt = run_flow("survives.yaml")
            assert attempt.injected[0].what == "kill_worker of rank 1"
            assert len(attempt.recoveries_s) == 1

        def test_that_fails(run_flow):
            run_flow("wishes.yaml")

        def test_bad_flow(run_flow):
            with pytest.raises(UsageError, match="node_lots: "):
                run_flow({"job": "job.yaml", "expect": [{"node_lots": {}}]})
        """,
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*wishes.yaml:8: *recovered {cycle: 2}*"])


def test_hung_test_shows_stacks(theirs):
    """Where pytest-timeout ends a test, the report has the stacks of its jobs' workers and of the other processes."""
    result = run(
        theirs,
        """
        import sys

        def test_hangs(job):
            code = "import threading\\ndef stuck(): threading.Event().wait()\\nstuck()"
            job({"command": [sys.executable, "-c", code]}).wait()
        """,
        "--timeout=20",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*job local-*: workers/main-0-rank-0.txt*", "*stuck*"])
    result.stdout.fnmatch_lines(["*job local-*: processes/*"])


def test_timeout_of_the_plugin(theirs):
    """Without pytest-timeout the plugin's own timeout ends the jobs, and so the test's wait for them."""
    theirs.makeini("[pytest]\nnvrx_slurm_timeout = 5s\n")
    result = run(
        theirs,
        """
        def test_hangs(job):
            assert job("job.yaml").wait() == 143
        """,
        "-p",
        "no:timeout",
    )
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*the test's jobs were ended after 5 s (nvrx_slurm_timeout)*"])


@pytest.mark.parametrize(("ci", "outcome"), [("", {"skipped": 1}), ("true", {"errors": 1})])
def test_without_slurm(theirs, monkeypatch, ci, outcome):
    """Where Slurm is not installed a marked test is skipped with the reason; in CI it fails."""
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    theirs.makeconftest("from nvrx_slurm.lab.devcluster import programs\nprograms._SBIN = ''")
    result = run(theirs, "import pytest\n\n@pytest.mark.slurm\ndef test_it(): pass", "-rs")
    result.assert_outcomes(**outcome)
    result.stdout.fnmatch_lines(["*Slurm is not installed: *slurmctld*"])


def test_bad_markers(theirs):
    """Each marker with wrong arguments is named before any test runs."""
    arguments = ["nodes=0", "nodes='many'", "size=3", "1, 2"]
    tests = [f"@pytest.mark.slurm({each})\ndef test_{index}(): pass\n" for index, each in enumerate(arguments)]
    result = run(theirs, "\n".join(["import pytest", *tests]))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    for index in range(len(arguments)):
        result.stderr.fnmatch_lines([f"*test_{index}: slurm(nodes=N) wants a number of nodes from 1 on*"])


@pytest.mark.slurm
def test_killed_session_leaves_nothing(theirs):
    """After SIGKILL of pytest, its job and its Slurm still end, within seconds."""
    theirs.makepyfile(
        test_theirs="""
        from pathlib import Path
        import pytest

        @pytest.mark.slurm(nodes=2)
        def test_it(job):
            running = job("job.yaml")
            next(entry for entry in running.events(follow=True) if "WorkersStarted" in repr(entry.record))
            Path("running").write_text("now")
            running.wait()
        """
    )
    command = [sys.executable, "-m", "pytest", f"--basetemp={theirs.path / 'base'}"]
    session = subprocess.Popen(command, cwd=theirs.path, stdout=subprocess.DEVNULL)
    until(lambda: (theirs.path / "running").exists(), "the job to run")
    assert of(theirs.path)
    session.send_signal(signal.SIGKILL)
    session.wait()
    until(lambda: not of(theirs.path) and not clusters(session.pid), "nothing to be left")


def clusters(pid: int) -> list[str]:
    """The clusters of that session."""
    return [name for name in names() if name == f"pytest-{pid}"]
