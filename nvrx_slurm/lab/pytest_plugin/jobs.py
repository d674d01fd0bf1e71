"""What the pytest plugin starts, and how it ends: one folder a session, one below it for each test's jobs."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nvrx_slurm.api.handle import Job
from nvrx_slurm.api.prepared import prepare
from nvrx_slurm.api.submission import hand_over
from nvrx_slurm.errors import NvrxError
from nvrx_slurm.jobspec.load import load
from nvrx_slurm.jobspec.plan import plan
from nvrx_slurm.lab.devcluster import DevCluster, names, remove
from nvrx_slurm.lab.flow.cleanup import MARK, CleanupList, clean_up
from nvrx_slurm.lab.flow.guard import RunGuard
from nvrx_slurm.lab.flow.stages import diagnosis
from nvrx_slurm.lab.flow.stages.remote import here as this_machine
from nvrx_slurm.lab.flow.writing import to_yaml
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.files import make_folders
from nvrx_slurm.util.processes import is_alive

if TYPE_CHECKING:
    from nvrx_slurm.api.handle import ClusterName

PREFIX = "pytest-"
PATIENCE_S = 10.0
"""How long a job may take to end by itself after its test; then it is killed."""


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
            pid = other.removeprefix(PREFIX)
            if other.startswith(PREFIX) and pid.isdigit() and (int(pid) == os.getpid() or not is_alive(int(pid))):
                remove(other)
        folder = self._folder / "session" / "cluster"
        make_folders(folder)
        name = f"{PREFIX}{os.getpid()}"
        cleanup = CleanupList(folder)
        cleanup.cluster(name)
        with DevCluster.up(name=name, nodes=nodes) as cluster:
            yield cluster
        cleanup.nothing()
        cleanup.close()

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
        path = self._write(job_file) if isinstance(job_file, Mapping) else self._here / job_file
        flags = [(key.replace("__", "."), f"{key}=", value) for key, value in overrides.items()]
        spec, base = load(path, flags).spec, self._folder / "jobs"
        prepared = prepare(spec, plan(spec, folder=base, job_file=path), cluster=self._kind)
        if not self._jobs:
            self._bound.start()
            if self._kind == "slurm":
                self._hold.queue(self.environment)
        job = Job(hand_over(prepared, cluster=self._kind), folder=base, cluster=self._kind)
        self._hold.job(job, self.environment)
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

    def close(self) -> None:
        """End every job, with all its processes; kill who does not end in time. Raises NvrxError: what is left."""
        self._bound.cancel()
        problems = clean_up(self._folder, 0.0 if self.bound_passed else PATIENCE_S)
        self._hold.close()
        if problems:
            raise NvrxError("\n".join(problems))

    def _write(self, keys: Mapping[str, Any]) -> Path:
        """A job.yaml with these keys. Workers start where the test's file lies, unless it says otherwise."""
        path = self._folder / f"job-{len(self._jobs) + 1}.yaml"
        path.write_text(to_yaml({"name": "test", "workdir": str(self._here), **keys}))
        return path

    def _pass_bound(self) -> None:
        """The test waits for something that does not come. Without its jobs, its waits end."""
        self.bound_passed = True
        frames = sys._current_frames()
        own = [line for thread in threading.enumerate() if thread.ident in frames for line in _stack(thread, frames)]
        self._test.add_report_section("call", "the test's own stacks", "".join(own))
        self.show_stacks()
        clean_up(self._folder, 0.0)


def _stack(thread: threading.Thread, frames: Mapping[int, Any]) -> list[str]:
    assert thread.ident is not None
    return [f"thread {thread.name}:\n", *traceback.format_stack(frames[thread.ident])]
