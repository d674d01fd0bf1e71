"""What the fixtures of the pytest plugin start, and how it ends.

Jobs: one folder a session, one below it for each test's jobs. Flows: by `nvrx-slurm ci run`, in a process that cleans
up by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
import pytest

from nvrx_slurm.api.handle import Job
from nvrx_slurm.api.submission import hand_over, prepare
from nvrx_slurm.errors import EXIT_INTERRUPTED, EXIT_USAGE, NvrxError, UsageError
from nvrx_slurm.jobspec.load import load
from nvrx_slurm.jobspec.plan import plan
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.lab.devcluster import DevCluster, names, remove
from nvrx_slurm.lab.flow import report_text
from nvrx_slurm.lab.flow.cleanup import MARK, CleanupList, clean_up
from nvrx_slurm.lab.flow.guard import RunGuard
from nvrx_slurm.lab.flow.model import StageName
from nvrx_slurm.lab.flow.outcome import FlowAttempt, SuiteOutcome
from nvrx_slurm.lab.flow.stages import diagnosis
from nvrx_slurm.lab.flow.stages.remote import here as this_machine
from nvrx_slurm.lab.flow.writing import to_yaml
from nvrx_slurm.report.ending import end_lines
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.files import make_folders
from nvrx_slurm.util.processes import dies_with_parent, is_alive

if TYPE_CHECKING:
    from nvrx_slurm.cluster.base import ClusterName

PREFIX = "pytest-"
# How long a run of a flow may take to undo what it did, once interrupted.
ENDED_S = 10.0

# How long a job may take to end by itself after its test; then it is killed.
PATIENCE_S = 10.0


class PytestSession:
    """All that one process of pytest starts. Its guard ends that, should the process be killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tests = 0
        self._guard = RunGuard(folder)

    @contextlib.contextmanager
    def cluster(self, nodes: int) -> Iterator[DevCluster]:
        """A Slurm of so many nodes, under the guard."""
        # Clusters of sessions that were killed together with their guards; their names hold those sessions' pids.
        for other in names():
            # This process has no cluster yet: one that is named by its pid is an earlier process's.
            pid = other.removeprefix(PREFIX)
            if other.startswith(PREFIX) and pid.isdigit() and (int(pid) == os.getpid() or not is_alive(int(pid))):
                remove(other)
        folder = self._folder / "session" / "cluster"
        make_folders(folder)
        name = f"{PREFIX}{os.getpid()}"
        with contextlib.closing(CleanupList(folder)) as cleanup:
            cleanup.cluster(name)
            with DevCluster.up(name=name, nodes=nodes) as cluster:
                yield cluster
            cleanup.nothing()

    def jobs(self, test: pytest.Item, *, here: Path, cluster: DevCluster | None, bound_s: float) -> Jobs:
        """The jobs of one test, under the guard."""
        self._tests += 1
        folder = self._folder / "tests" / str(self._tests)
        make_folders(folder)
        return Jobs(folder, test, here=here, cluster=cluster, bound_s=bound_s)

    def close(self) -> None:
        self._guard.dismiss()


class Jobs:
    """Submits a test's jobs when it is called, shows their stacks when it hangs, and ends them all.

    `environment`: what must be set while it is in use.
    """

    def __init__(
        self, folder: Path, test: pytest.Item, *, here: Path, cluster: DevCluster | None, bound_s: float
    ) -> None:
        self._folder, self._test, self._here = folder, test, here
        self._kind: ClusterName = "local" if cluster is None else "slurm"
        self.environment = {MARK: str(folder), **(cluster.environment() if cluster else {})}
        self._hold = CleanupList(folder)
        self._jobs: list[Job] = []
        self.bound_passed = False
        self._bound = threading.Timer(bound_s, self._pass_bound)
        self._bound.daemon = True

    def __call__(self, job_file: str | Path | Mapping[str, Any], **overrides: Any) -> Job:
        """Submit a job. `overrides` are keys of job.yaml; a double underscore goes a level down (`slurm__time="2m"`).

        Raises what `nvrx_slurm.submit` raises.
        """
        if isinstance(job_file, Mapping):
            # Workers start where the test's file lies, unless the keys say otherwise.
            path = self._folder / f"job-{len(self._jobs) + 1}.yaml"
            path.write_text(to_yaml({"name": "test", "workdir": str(self._here), **job_file}))
        else:
            path = self._here / job_file
        flags = [(key.replace("__", "."), f"{key}=", value) for key, value in overrides.items()]
        spec, base = load(path, flags).spec, self._folder / "jobs"
        prepared = prepare(spec, plan(spec, folder=base, job_file=path), cluster=self._kind)
        if not self._jobs:
            self._bound.start()
            if self._kind == "slurm":
                self._hold.queue(self.environment)
        job = Job(hand_over(prepared, cluster=self._kind), folder=base, cluster=self._kind)
        self._hold.job(job)
        self._jobs.append(job)
        return job

    def show_stacks(self) -> None:
        """Add the stacks of every process of the jobs that run to the test's report. Bounded; raises nothing."""
        for job in self._jobs:
            out = self._folder / "diagnosis" / job.job_id
            steps = {
                "workers": partial(diagnosis.worker_stacks, job, out / "workers"),
                "processes": partial(
                    diagnosis.process_accounts, job, this_machine(SystemClock()), "", out / "processes"
                ),
            }
            diagnosis.take(steps, out)
            for file in sorted(out.rglob("*.txt")):
                title = f"job {job.job_id}: {file.relative_to(out)}"
                self._test.add_report_section("call", title, file.read_text(errors="replace"))

    def show_ends(self) -> None:
        """Add to the test's report how each job ended that did not end with 0. Raises nothing."""
        for job in self._jobs:
            with contextlib.suppress(NvrxError, OSError):
                if code := job.exit_code:
                    lines = end_lines(JobFolder(job.folder), code)
                    self._test.add_report_section("call", f"job {job.job_id}", "\n".join(lines))

    def close(self) -> None:
        """End every job, with all its processes; kill who does not end in time. Raises NvrxError: what is left."""
        self._bound.cancel()
        problems = clean_up(self._folder, 0.0 if self.bound_passed else PATIENCE_S)
        self._hold.close()
        if problems:
            raise NvrxError("\n".join(problems))

    def _pass_bound(self) -> None:
        # The test waits for something that does not happen. Without its jobs, its waits end.
        self.bound_passed = True
        frames, lines = sys._current_frames(), []
        for thread in threading.enumerate():
            if thread.ident in frames:
                lines += [f"thread {thread.name}:\n", *traceback.format_stack(frames[thread.ident])]
        self._test.add_report_section("call", "the test's own stacks", "".join(lines))
        self.show_stacks()
        clean_up(self._folder, 0.0)


class Flows:
    """The flows of one test. `folder`: for their files; `here`: from where relative paths count."""

    def __init__(self, folder: Path, *, here: Path, stage: StageName) -> None:
        self._folder, self._here, self._stage = folder, here, stage
        self._count = 0

    def run(self, flow: str | Path | Mapping[str, Any], *, on: StageName | None = None) -> FlowAttempt:
        """Run a flow once, and return how it went. Fails the test where it did not pass.

        Raises UsageError where the flow file is wrong, or its stage cannot be had.
        """
        self._count += 1
        if isinstance(flow, Mapping):
            path = self._folder / f"flow-{self._count}.yaml"
            job = {"job": str(self._here / str(flow["job"]))} if "job" in flow else {}
            path.write_text(to_yaml({**flow, **job}))
        else:
            path = self._here / flow
        results = self._folder / f"flow-{self._count}.json"
        artifacts = self._folder / f"flow-{self._count}-artifacts"
        flags = ("--on", on or self._stage, "--json", str(results), "--artifacts", str(artifacts), "--no-github")
        # The run ends with the test, for any reason that ends first.
        command = [sys.executable, "-P", "-m", "nvrx_slurm", "ci", "run", str(path), *flags]
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=dies_with_parent(signal.SIGTERM),
        )
        try:
            _, errors = process.communicate()
        except BaseException:  # a timeout of the test, or Ctrl-C: the run cancels its jobs before it ends
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # in place of what ended the test
                process.communicate(timeout=ENDED_S)
            raise
        if process.returncode == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        if not results.exists():
            message = errors.strip().removeprefix("nvrx-slurm: error: ")
            raise UsageError(message) if process.returncode == EXIT_USAGE else RuntimeError(message)
        (outcome,) = msgspec.json.decode(results.read_bytes(), type=SuiteOutcome).flows
        if outcome.left_out is not None:
            raise UsageError(f"{path}: {outcome.left_out}")
        if outcome.status != "passed":
            pytest.fail("\n".join(map(click.unstyle, report_text.findings(outcome, Path.cwd()))), pytrace=False)
        return outcome.attempts[-1]
