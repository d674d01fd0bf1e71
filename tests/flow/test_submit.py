"""Submitting jobs to a real Slurm, and following them: by the port, from Python, from the command line."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import nvrx_slurm as nv
from nvrx_slurm.api.handle import Job
from nvrx_slurm.cluster.commands import CommandOutput, SystemRunner
from nvrx_slurm.cluster.slurm import SlurmCluster
from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.errors import SlurmUnreachable, SubmissionRefused, UsageError
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.lab.devcluster import DevCluster
from nvrx_slurm.lab.devcluster.daemons import recorded
from nvrx_slurm.report import snapshot
from tests.forks import run_command
from tests.waiting import until

pytestmark = pytest.mark.slurm

JOB = """\
name: followed
command: [sleep, "300"]
nodes: 2
spares: 1
fault_tolerance: {teardown: {grace: 2s}}
"""


@pytest.fixture
def slurm(healthy_cluster: DevCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """The session's Slurm, also for the processes that this test starts."""
    for name, value in healthy_cluster.environment().items():
        monkeypatch.setenv(name, value)
    return SlurmCluster()


class Gated:
    """A batch script that waits at a pipe until `let_go` is called."""

    def __init__(self, folder: Path, *flags: str, then: str = "true") -> None:
        self._pipe = folder / "pipe"
        os.mkfifo(self._pipe)
        lines = "".join(f"#SBATCH {flag}\n" for flag in ("--output=/dev/null", *flags))
        self.script = f"#!/bin/bash\n{lines}read -r < {self._pipe}\n{then}\n"

    def let_go(self) -> None:
        self._pipe.write_text("\n")


def script(*flags: str, body: str = "true") -> str:
    return "#!/bin/bash\n" + "".join(f"#SBATCH {flag}\n" for flag in ("--output=/dev/null", *flags)) + body + "\n"


def reaches(cluster: SlurmCluster, job_id: str, state: JobState) -> None:
    """Wait until the job is in this state."""

    def there() -> bool:
        return cluster.states([job_id])[job_id] is state

    until(there, f"job {job_id} to be {state}")


def nvrx(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_command(arguments, cwd=folder, timeout=90)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with a job.yaml whose workers would sleep for minutes."""
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


# ---- Python


def test_python_takes_a_range_of_spares_as_job_yaml_does(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A range is valid in a spec and as an override of `submit`. Slurm gives all spares of the range, and the job's
    plan has their number."""
    spec = nv.JobSpec(name="range", command="true", spares="0..1")  # type: ignore[arg-type]  # as `command`
    assert (spec.min_spares, spec.spares) == (0, 1)
    job = nv.submit(spec, spares="1..2", folder=tmp_path / "jobs")
    assert job.wait(timeout=60) == 0
    plan = JobFolder(job.folder).read_plan()
    assert (plan.min_spares, plan.spares, len(job.nodes())) == (None, 2, 3)


def test_the_users_srun_variables_are_not_the_agents(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm itself advises users to export SRUN_CPUS_PER_TASK in scripts. The agents' srun must ignore it, or it
    would request more than the job has."""
    monkeypatch.setenv("SRUN_CPUS_PER_TASK", "512")
    job = nv.submit(nv.JobSpec(name="srun", command=("true",)), folder=tmp_path / "jobs")
    assert job.wait(timeout=60) == 0


# ---- the port


def test_a_job_is_followed_from_submission_to_its_end(slurm: SlurmCluster, tmp_path: Path) -> None:
    """RUNNING on its nodes, in Slurm's order; then COMPLETED; and cancelling it then changes nothing."""
    gated = Gated(tmp_path, "--nodes=3")
    job_id = slurm.submit(gated.script, folder=tmp_path / "jobs", name="a")
    reaches(slurm, job_id, JobState.RUNNING)
    assert slurm.nodes(job_id) == ("n1", "n2", "n3")
    gated.let_go()
    reaches(slurm, job_id, JobState.COMPLETED)
    slurm.cancel(job_id)
    assert slurm.states([job_id]) == {job_id: JobState.COMPLETED}
    assert (tmp_path / "jobs" / job_id / "job.sh").read_text() == gated.script


def test_one_call_returns_the_states_of_many_jobs(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The jobs are one that has ended, one that has failed, one that is pending, an array, one of its tasks, and one
    that never existed."""
    done = slurm.submit(script(), folder=tmp_path, name="a")
    failed = slurm.submit(script(body="exit 3"), folder=tmp_path, name="b")
    waiting = slurm.submit(script("--begin=now+1hour"), folder=tmp_path, name="c")
    array = slurm.submit(script("--array=0-2", "--begin=now+1hour"), folder=tmp_path, name="d")
    reaches(slurm, done, JobState.COMPLETED)
    reaches(slurm, failed, JobState.FAILED)
    asked = [done, failed, waiting, array, f"{array}_2", "999999"]
    states = ["COMPLETED", "FAILED", "PENDING", "PENDING", "PENDING", "UNKNOWN"]
    assert slurm.states(asked) == dict(zip(asked, states, strict=True))
    assert slurm.nodes(waiting) == ()


def test_a_waiting_job_can_be_cancelled(slurm: SlurmCluster, tmp_path: Path) -> None:
    """It leaves no result, so its state gives the exit code."""
    job_id = slurm.submit(script("--begin=now+1hour"), folder=tmp_path, name="a")
    job = nv.job(job_id, folder=tmp_path)
    assert job.state is JobState.PENDING
    job.cancel()
    assert job.wait(timeout=30) == 143
    assert job.state is JobState.CANCELLED


def test_a_pending_job_says_why_and_stays_cancelled(slurm: SlurmCluster, workplace: Path) -> None:
    """`wait`, `status` and `ci run` give Slurm's reason. A job that is cancelled in the queue is cancelled for all
    commands, also when Slurm has forgotten it."""
    (workplace / "job.yaml").write_text(f"{JOB}slurm: {{extra: {{hold: true}}}}\n")
    job_id = nvrx("submit", folder=workplace).stdout.strip()
    waiting = subprocess.Popen(
        [sys.executable, "-m", "nvrx_slurm", "wait", job_id], cwd=workplace, stderr=subprocess.PIPE, text=True
    )
    assert waiting.stderr is not None
    assert "JobHeldUser" in next(line for line in waiting.stderr if "PENDING:" in line)
    shown = json.loads(nvrx("status", job_id, "--json", folder=workplace).stdout)
    assert (shown["state"], shown["queue"]["reason"]) == ("pending", "JobHeldUser")
    slurm.cancel(job_id)
    waiting.stderr.read()
    assert waiting.wait(timeout=30) == 143
    waiting.stderr.close()
    files = JobFolder(workplace / "nvrx-jobs" / job_id)
    assert snapshot.take(files, slurm=lambda job_id: JobState.UNKNOWN).state == "cancelled"
    assert nv.job(job_id, folder=files.path.parent).exit_code == 143
    explained = nvrx("explain", job_id, folder=workplace)
    assert (explained.returncode, explained.stderr) == (0, "")
    assert f"job {job_id} was cancelled with exit code 143" in explained.stdout

    (workplace / "flow.yaml").write_text(
        "name: held\njob: job.yaml\non: [slurm]\nexpect: [job_ended]\nlimits: {wall: 4s}\n"
    )
    done = nvrx("ci", "run", "flow.yaml", "--on=slurm", folder=workplace)
    assert done.returncode == 1, done.stdout
    assert "is pending: JobHeldUser" in done.stderr
    assert "Slurm did not start the job: JobHeldUser" in done.stdout


def test_explain_asks_slurm_about_a_job_that_left_no_result(slurm: SlurmCluster, workplace: Path) -> None:
    """`explain` asks Slurm about a job that was cancelled in the queue, and whose end no other command saw."""
    job_id = nvrx("submit", "--set", "slurm.extra.hold=true", "job.yaml", folder=workplace).stdout.strip()
    slurm.cancel(job_id)
    explained = nvrx("explain", job_id, folder=workplace)
    assert (explained.returncode, explained.stderr) == (0, "")
    assert f"job {job_id} was cancelled with exit code 143" in explained.stdout


def test_a_job_waits_for_the_one_that_it_depends_on(slurm: SlurmCluster, workplace: Path) -> None:
    """`slurm.dependency`, from the flag --set here: `status` gives the reason, and the end of the other starts it."""
    first = slurm.submit(script("--hold"), folder=workplace, name="first")
    quick = ["--set", f"slurm.dependency=afterok:{first}", "--set", "command=true"]
    job_id = nvrx("submit", *quick, "job.yaml", folder=workplace).stdout.strip()
    shown = json.loads(nvrx("status", job_id, "--json", folder=workplace).stdout)
    assert (shown["state"], shown["queue"]["reason"]) == ("pending", "Dependency")
    subprocess.run(["scontrol", "release", first], check=True)
    assert nvrx("wait", job_id, "--timeout", "2m", folder=workplace).returncode == 0


def test_a_job_that_never_was_cannot_be_cancelled(slurm: SlurmCluster) -> None:
    """Cancelling an unknown job is an error, where scancel itself would print nothing."""
    with pytest.raises(UsageError, match="no job 999999"):
        slurm.cancel("999999")


def test_what_slurm_refuses_leaves_nothing_behind(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The error has Slurm's own reason, and no file is left."""
    with pytest.raises(SubmissionRefused, match="Invalid partition name specified"):
        slurm.submit(script("--partition=nope"), folder=tmp_path / "jobs", name="a")
    assert list(tmp_path.iterdir()) == []


def test_a_job_without_a_result_has_the_exit_code_of_its_state(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A plain script that fails leaves no result: the exit code is 1, whatever code the script had."""
    job_id = slurm.submit(script(body="exit 7"), folder=tmp_path, name="a")
    assert Job(job_id, folder=tmp_path, cluster="slurm").wait(timeout=30) == 1


# ---- several Slurms, or one that is made again


@pytest.mark.parametrize("names", [("a", "b"), ("a", "a")], ids=["beside each other", "at the same place"])
def test_each_slurm_has_a_job_1(names: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handles of one process do not confuse job 1 of two Slurms: each has its own end."""
    ends = []
    for number, (name, begin) in enumerate(zip(names, ("now+1hour", "now"), strict=True)):
        with DevCluster.up(name=f"submit-{os.getpid()}-{name}", nodes=1) as cluster:
            for variable, value in cluster.environment().items():
                monkeypatch.setenv(variable, value)
            spec = nv.JobSpec(name="first", command=["true"], slurm={"extra": {"begin": begin}})
            job = nv.submit(spec, folder=tmp_path / str(number))
            if begin != "now":
                job.cancel()
            ends.append((job.job_id, job.wait(timeout=60), job.wait_until_gone()))
    assert ends == [("1", 143, JobState.CANCELLED), ("1", 0, JobState.COMPLETED)]


def test_a_second_job_1_in_one_folder_is_no_continuation_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster that is made again reuses the id. The first job's folder is renamed, and keeps its content."""
    ends = []
    for command in ("true", "false"):
        with DevCluster.up(name=f"submit-{os.getpid()}-again", nodes=1) as cluster:
            for variable, value in cluster.environment().items():
                monkeypatch.setenv(variable, value)
            spec = nv.JobSpec(name=command, command=[command], fault_tolerance={"max_restarts": 0})
            job = nv.submit(spec, folder=tmp_path)
            assert JobFolder(job.folder).read_plan().name == command
            ends.append((job.job_id, job.wait(timeout=60), job.wait_until_gone()))
    assert ends == [("1", 0, JobState.COMPLETED), ("1", 1, JobState.FAILED)]
    (aside,) = tmp_path.glob("1-*")
    first = JobFolder(aside).read_info()
    assert first is not None and first.name == "true"


# ---- a Slurm that does not answer


@pytest.fixture
def lonely() -> Iterator[tuple[DevCluster, int]]:
    """A Slurm of one node for this test alone, and its slurmctld's pid."""
    with DevCluster.up(name=f"submit-{os.getpid()}", nodes=1, settings={"MessageTimeout": "3"}) as cluster:
        yield cluster, recorded(cluster.spec.places)["slurmctld"].pid


def test_a_stopped_slurmctld_is_asked_again_and_then_given_up(
    lonely: tuple[DevCluster, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A frozen slurmctld accepts connections and answers none: the query fails after its bound, and the log says that
    it was retried."""
    cluster, controller = lonely
    slurm = SlurmCluster(SystemRunner(cluster.environment()), patience_s=0.5)
    os.kill(controller, signal.SIGSTOP)
    try:
        with caplog.at_level(logging.WARNING), pytest.raises(SlurmUnreachable, match="timed out"):
            slurm.states(["1"])
        assert "trying again for 0.5 s" in caplog.text
    finally:
        os.kill(controller, signal.SIGCONT)
    assert slurm.states(["1"]) == {"1": JobState.UNKNOWN}


def test_a_submission_that_a_frozen_slurmctld_took_in_is_not_made_twice(
    lonely: tuple[DevCluster, int], tmp_path: Path
) -> None:
    """sbatch times out, then slurmctld continues and accepts the job: that job is found, and not submitted again."""
    cluster, controller = lonely
    real = SystemRunner(cluster.environment())

    def waking(command: Sequence[str], *, timeout_s: float) -> CommandOutput:
        output = real(command, timeout_s=timeout_s)
        os.kill(controller, signal.SIGCONT)
        return output

    os.kill(controller, signal.SIGSTOP)
    try:
        job_id = SlurmCluster(waking).submit(script("--begin=now+1hour"), folder=tmp_path, name="a")
    finally:
        os.kill(controller, signal.SIGCONT)
    listed = real(["squeue", "--noheader", "--format=%i"], timeout_s=30).stdout.split()
    assert listed == [job_id]


# ---- the command line


@pytest.mark.usefixtures("slurm")
def test_submit_prints_the_id_alone_and_wait_and_cancel_follow(workplace: Path) -> None:
    """Warnings go to stderr. `wait` ends after its timeout. `cancel` returns once the workers are gone."""
    submitted = nvrx("submit", "job.yaml", folder=workplace)
    job_id = submitted.stdout.removesuffix("\n")
    assert (submitted.returncode, job_id.isdigit()) == (0, True)
    assert "before 23.02.3" in submitted.stderr or not _is_old_slurm()
    waited = nvrx("wait", job_id, "--timeout", "300ms", folder=workplace)
    assert waited.returncode == 124
    assert f"job {job_id} has not ended within 0.3 s" in waited.stderr
    reaches(SlurmCluster(), job_id, JobState.RUNNING)
    cancelled = nvrx("cancel", job_id, folder=workplace)
    assert (cancelled.returncode, cancelled.stdout) == (0, "CANCELLED\n")
    assert nvrx("wait", job_id, folder=workplace).returncode == 143


def _is_old_slurm() -> bool:
    return subprocess.run(["sbatch", "--version"], capture_output=True, text=True).stdout.split()[1] < "23.02.3"


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_submit_and_wait_cancels_the_job(workplace: Path, number: int, exit_code: int) -> None:
    """The job is gone when the command returns."""
    command = [sys.executable, "-m", "nvrx_slurm", "submit", "--wait", "--json", "job.yaml"]
    with subprocess.Popen(
        command, cwd=workplace, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        submitted = json.loads(process.stdout.readline())
        reaches(SlurmCluster(), submitted["job"], JobState.RUNNING)
        process.send_signal(number)
        assert process.wait(timeout=60) == exit_code
    assert submitted["folder"] == str(workplace / "nvrx-jobs" / submitted["job"])
    assert SlurmCluster().states([submitted["job"]])[submitted["job"]].terminal
    assert nv.job(submitted["job"], folder=workplace / "nvrx-jobs").state is JobState.CANCELLED


@pytest.mark.usefixtures("slurm")
def test_submit_and_wait_exits_with_the_jobs_code(workplace: Path) -> None:
    """The exit code, 93 as any other, comes from the job's result, not from Slurm. Standard error says why."""
    done = nvrx("submit", "--wait", "--set", "command=true", "job.yaml", folder=workplace)
    assert done.returncode == 0
    assert "explain" not in done.stderr
    failed = nvrx(
        "submit", "--wait", "--set", "command=false", "--set", "fault_tolerance.max_restarts=0", "job.yaml",
        folder=workplace,
    )  # fmt: skip
    assert failed.returncode == 1
    for words in ("exited with code 1", "restart budget spent", f"→ nvrx-slurm explain {failed.stdout.strip()}"):
        assert words in failed.stderr


@pytest.mark.usefixtures("slurm")
def test_a_dry_run_submits_nothing(workplace: Path) -> None:
    """The script on stdout, no job in the queue, no folder."""
    shown = nvrx("submit", "--dry-run", "job.yaml", folder=workplace)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("#!/bin/bash")
    assert [path.name for path in workplace.iterdir()] == ["job.yaml"]


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["submit", "--set", "slurm.partition=nope", "job.yaml"], "Invalid partition name specified"),
        (["submit", "--folder", "job.yaml", "job.yaml"], "is a file; --folder names"),
        (["submit", "--wait", "--watch", "job.yaml"], "choose one"),
        (["wait", "999999"], "no job '999999'"),
        (["cancel", "local-x"], "no job 'local-x'"),
        (["wait", "1", "--timeout", "soon", "--folder", "."], "is no duration"),
    ],
)
def test_bad_input_is_one_clear_error(workplace: Path, arguments: list[str], words: str) -> None:
    """Exit code 2, nothing on stdout, no traceback, nothing left behind."""
    refused = nvrx(*arguments, folder=workplace)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert words in refused.stderr
    assert "Traceback" not in refused.stderr
    assert refused.stderr.count("error:") == 1
    assert [path.name for path in workplace.iterdir()] == ["job.yaml"]
