"""`nvrx-slurm ci run`, as a user calls it, on real jobs. However the run ends, it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from nvrx_slurm.cli import cli
from nvrx_slurm.lab.devcluster import DevCluster, names
from nvrx_slurm.lab.devcluster.processes import environment_of, read_table
from nvrx_slurm.lab.flow.cleanup import MARK
from nvrx_slurm.lab.flow.suite import INTERRUPTED_S
from nvrx_slurm.util.files import RUNTIME_ROOTS, JobFiles
from tests.harness import Gate
from tests.slurm_harness import CLI
from tests.waiting import until

CALM = {"teardown": {"grace": "2s"}, "heartbeat": {"interval": "500ms", "timeout": "5s"}}
PASSES = [{"job_ended": {"exit_code": 0}}]
NEVER_COMES = [{"node_lost": {}}]


class Run:
    """One call of `nvrx-slurm ci run`, in a folder of its own."""

    def __init__(self, folder: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        self.folder, self.artifacts = folder, folder / "artifacts"
        self.process = subprocess.Popen(
            [*CLI, "ci", "run", "flows", "--artifacts", "artifacts", "--json", "results.json", *flags],
            cwd=folder,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def ends(self, within_s: float = 60.0) -> int:
        """Wait for the end of the run; returns its exit code."""
        self.said, _ = self.process.communicate(timeout=within_s)
        return self.process.returncode

    def outcome(self, flow: str) -> dict:
        """The flow's entry in the file of `--json`."""
        flows = json.loads((self.folder / "results.json").read_text())["flows"]
        return next(each for each in flows if each["name"] == flow)

    def everything(self) -> list[int]:
        """Every process on this machine of any attempt of the run."""
        return [
            pid for pid in read_table() if environment_of(pid).get(MARK, "").startswith(str(self.artifacts) + os.sep)
        ]

    def leaves_nothing(self, within_s: float) -> None:
        """Wait until no process, no cluster and no folder in memory is left of the run."""
        until(
            lambda: not self.everything() and not self.clusters() and not self.memory(),
            f"nothing to be left of {self.artifacts}",
            timeout=within_s,
        )

    def memory(self) -> list[Path]:
        """The folders that agents of the run's jobs keep in this machine's memory."""
        names = [JobFiles(job).runtime_name for job in self.artifacts.glob("*/*/jobs/*/")]
        return [path for name in names for root in RUNTIME_ROOTS for path in root.glob(f"{name}-*")]

    def clusters(self) -> list[str]:
        """The development clusters that attempts of the run have started."""
        held = "".join(path.read_text() for path in self.artifacts.rglob("held.jsonl"))
        return [name for name in names() if f'"{name}"' in held]

    def attempt_pid(self, flow: str) -> int:
        """The process of the flow's first attempt."""
        wanted = str(self.artifacts / flow / "attempt-1")
        for pid in self.everything():
            command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "nvrx_slurm.lab.flow.attempt" in command and wanted in command:
                return pid
        raise AssertionError(f"{flow} does not run: {self.everything()}")


@pytest.fixture
def write_flow(tmp_path: Path, gate: Gate) -> Callable[..., None]:
    """Writes a flow and its job: gate workers, one a node, unless `command` says otherwise."""

    def write(name: str, expect: list, *, command: list[str] | None = None, job: dict | None = None, **rest) -> None:
        flows = tmp_path / "flows"
        flows.mkdir(exist_ok=True)
        spec = {"name": name, "command": command or list(gate.command), "fault_tolerance": CALM, **(job or {})}
        YAML().dump(spec, tmp_path / f"{name}.job.yaml")
        flow = {"job": f"../{name}.job.yaml", "expect": expect, "limits": {"wall": "60s"}, **rest}
        YAML().dump(flow, flows / f"{name}.yaml")

    return write


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts `ci run`. Teardown ends what still runs, and waits until nothing is left."""
    runs: list[Run] = []

    def start(*flags: str, **options) -> Run:
        runs.append(Run(tmp_path, *flags, **options))
        return runs[-1]

    yield start
    for each in runs:
        if each.process.poll() is None:
            each.process.kill()
            each.process.communicate()
        if each.artifacts.exists():  # a run that has begun
            cleaned = CliRunner().invoke(cli, ["ci", "clean", str(each.artifacts)], standalone_mode=False)
            assert cleaned.exit_code == 0, cleaned.output
        each.leaves_nothing(within_s=60.0)


def test_passed_flow_leaves_nothing_and_failed_flow_leaves_its_evidence(write_flow, run):
    """Of two flows whose job exits with 0, one passes and leaves nothing. The other misses an event: the run exits
    with 1, prints the line of the flow file, and keeps the flow's journal. A flow whose fault was never injected
    fails too, although its expectations are met. A flow that needs Slurm is left out: it has neither failed nor
    passed."""
    fault = {"when": {"event": "node_lost"}, "do": {"kill_worker": {"rank": 0}}}
    write_flow("good", PASSES, command=["true"])
    write_flow("bad", [{"job_ended": {"exit_code": 7}}], command=["true"])
    write_flow("vacuous", PASSES, command=["true"], faults=[fault])
    write_flow("there", PASSES, command=["true"], on=["dev"])
    each = run("--on", "local", "--junit", "junit.xml", "--html", "page.html")
    assert each.ends() == 1, each.said
    good, bad, there = each.outcome("good"), each.outcome("bad"), each.outcome("there")
    assert (good["status"], bad["status"], there["status"]) == ("passed", "failed", "left_out")
    assert "dev" in there["left_out"]
    (finding,) = bad["attempts"][0]["findings"]
    assert (Path(finding["file"]).name, finding["line"]) == ("bad.yaml", 3)
    assert f"bad.yaml:{finding['line']}" in each.said
    assert any("exit_code: 0, not 7" in line for line in finding["detail"])
    (finding,) = each.outcome("vacuous")["attempts"][0]["findings"]
    assert finding["kind"] == "fault"
    assert "did not happen" in finding["message"]
    assert not (each.artifacts / "good").exists()
    assert list((each.artifacts / "bad" / "attempt-1").glob("jobs/*/events.jsonl"))
    assert (each.folder / "junit.xml").read_text().count("<testcase") == 4
    assert "<html" in (each.folder / "page.html").read_text()
    each.leaves_nothing(within_s=0.0)


def test_report_that_cannot_be_written_costs_no_other(write_flow, run):
    """A wrong report path is refused before anything runs. A full disk at the end costs only that report, and the run
    exits with 1 although all flows have passed."""
    write_flow("good", PASSES, command=["true"])
    refused = run("--on", "local", "--junit", "flows/good.yaml/junit.xml")
    assert refused.ends() == 2 and not refused.artifacts.exists()
    assert "--junit flows/good.yaml/junit.xml: cannot be written" in refused.said
    each = run("--on", "local", "--junit", "/dev/full")
    assert each.ends() == 1
    assert "/dev/full: cannot be written: No space left on device" in each.said
    assert "1 passed on local" in each.said
    assert each.outcome("good")["status"] == "passed"


def test_end_that_the_journal_does_not_have_is_explained(write_flow, run):
    """Where no controller could journal the job's end, the missed expectation shows the job's exit code and
    reason."""
    faults = [
        {"when": {"event": "workers_started"}, "do": "revoke_store_password"},
        {"when": {"fault": 1}, "do": "kill_controller"},
    ]
    write_flow("refused", ["workers_started", {"job_ended": {"exit_code": 69}}], faults=faults)
    each = run("--on", "local")
    assert each.ends() == 1, each.said
    (finding,) = each.outcome("refused")["attempts"][0]["findings"]
    assert any("exit code 69: the controller gave the store up" in line for line in finding["detail"])
    each.leaves_nothing(within_s=0.0)


def test_flow_that_passes_at_its_second_attempt_is_reported_as_flaky(write_flow, run, tmp_path):
    """With --retries the second attempt counts, and the report still has the first."""
    once = ["sh", "-c", f"! mkdir {tmp_path}/been-here"]
    write_flow("moody", PASSES, command=once, job={"fault_tolerance": {**CALM, "max_restarts": 0}})
    each = run("--on", "local", "--retries", "2")
    assert each.ends() == 0, each.said
    moody = each.outcome("moody")
    assert moody["status"] == "flaky"
    assert [attempt["verdict"] for attempt in moody["attempts"]] == ["failed", "passed"]
    assert (each.artifacts / "moody" / "attempt-1").is_dir()


def test_bound_of_a_flow_is_kept_and_shows_what_hung(write_flow, run, gate):
    """For workers that wait for ever, the run writes the stacks of worker, agent and harness at `limits.wall`, and
    then ends the job."""
    write_flow("waits", PASSES, limits={"wall": "15s"})
    each = run("--on", "local")
    assert each.ends() == 1, each.said
    (attempt,) = each.outcome("waits")["attempts"]
    assert "limits.wall (15s) has passed" in attempt["findings"][0]["message"]
    told = "".join(
        path.read_text(errors="replace") for path in (each.artifacts).rglob("diagnosis/**/*") if path.is_file()
    )
    assert "gate_worker.py" in told
    assert "nvrx_slurm/agent/" in told
    assert "nvrx_slurm/lab/flow/attempt.py" in told
    each.leaves_nothing(within_s=0.0)


def test_run_that_is_out_of_time_reports_how_far_each_flow_was(write_flow, run):
    """`--timeout` ends the run with 124. The report has a flow that was running and a flow that had not begun."""
    write_flow("first", PASSES, limits={"wall": "50s"})
    write_flow("second", PASSES, limits={"wall": "40s"})
    each = run("--on", "local", "--jobs", "1", "--timeout", "15s")
    assert each.ends() == 124, each.said
    first, second = each.outcome("first"), each.outcome("second")
    assert first["status"] == second["status"] == "out_of_time"
    assert first["attempts"][0]["job_id"] is not None
    assert "not begun" in second["attempts"][0]["findings"][0]["message"]
    assert list(each.artifacts.glob("first/attempt-1/diagnosis/*"))
    each.leaves_nothing(within_s=0.0)


def test_bad_flow_ends_the_run_before_anything_is_submitted(write_flow, run):
    """Where one flow of two is wrong, the run prints one message, exits with 2, and makes no artifacts folder."""
    write_flow("good", PASSES, command=["true"])
    write_flow("bad", [{"job_endet": {}}])
    each = run("--on", "local")
    assert each.ends() == 2
    assert "bad.yaml:3: " in each.said
    assert "job_ended" in each.said
    assert not each.artifacts.exists()


def test_fault_that_the_stage_cannot_do_is_an_error_before_anything_is_submitted(write_flow, run):
    """A flow that drains a node on a stage without Slurm exits with 2. The error names the fault's line and the
    stages that can do it. No artifacts folder is left, neither the given one nor the default one."""
    fault = {"when": {"event": "workers_started"}, "do": {"drain_node": "n1"}}
    write_flow("drains", PASSES, faults=[fault])
    each = run("--on", "local")
    assert each.ends() == 2
    written = (each.folder / "flows" / "drains.yaml").read_text().splitlines()
    (line,) = [number for number, text in enumerate(written, 1) if "- when:" in text]
    assert re.search(rf"drains\.yaml:{line}: .*\bdev\b", each.said), each.said
    assert not each.artifacts.exists()
    by_default = subprocess.run([*CLI, "ci", "run", "flows", "--on", "local"], cwd=each.folder, capture_output=True)
    assert by_default.returncode == 2
    assert not (each.folder / "nvrx-ci").exists()


# ---- interrupted and killed, with one job running and one in the queue


@pytest.fixture
def two_flows(write_flow, gate: Gate) -> Callable[[], None]:
    """Two flows: a job that runs until its gate opens, and one that Slurm holds in its queue."""
    write_flow("runs", PASSES)
    write_flow("queued", PASSES, on=["dev", "slurm"], job={"slurm": {"extra": {"hold": True}}})
    return lambda: gate.wait(1, cycle=0, timeout=60.0)


def is_queued(each: Run) -> bool:
    return '"job"' in "".join(path.read_text() for path in each.artifacts.glob("queued/*/held.jsonl"))


def in_the_middle(each: Run, two_flows: Callable[[], None]) -> None:
    two_flows()
    until(lambda: is_queued(each), "the second job to be submitted")


@pytest.mark.slurm
def test_interrupted_run_has_undone_everything_within_its_bound(run, two_flows):
    """After SIGINT the run ends its jobs, clusters and processes, and reports each flow as interrupted. Its bound is
    below 7.5 s: GitHub's runner kills what takes longer."""
    assert INTERRUPTED_S < 7.5
    each = run("--on", "dev")
    in_the_middle(each, two_flows)
    each.process.send_signal(signal.SIGINT)
    assert each.ends() == 130
    each.leaves_nothing(within_s=0.0)
    assert {each.outcome(name)["status"] for name in ("runs", "queued")} == {"interrupted"}


def test_run_that_gets_sigterm_ends_as_an_interrupted_one(run, write_flow, gate):
    """After SIGTERM the run exits with 143, nothing of it runs on this machine, and the flow is reported as
    interrupted."""
    write_flow("runs", PASSES)
    each = run("--on", "local")
    gate.wait(1, cycle=0)
    each.process.send_signal(signal.SIGTERM)
    assert each.ends() == 143
    each.leaves_nothing(within_s=0.0)
    assert each.outcome("runs")["status"] == "interrupted"


@pytest.mark.slurm
def test_nothing_outlives_a_run_that_is_killed(run, two_flows):
    """After SIGKILL of the harness, which can clean up nothing, no job, cluster or process is left within 30 s."""
    each = run("--on", "dev")
    in_the_middle(each, two_flows)
    each.process.kill()
    each.process.communicate()
    each.leaves_nothing(within_s=30.0)


@pytest.mark.slurm
def test_attempt_that_is_killed_is_undone_and_the_others_go_on(run, two_flows, gate):
    """After SIGKILL of one attempt, its flow is broken and its finding names the signal; the other flow passes."""
    each = run("--on", "dev")
    in_the_middle(each, two_flows)
    os.kill(each.attempt_pid("queued"), signal.SIGKILL)
    gate.open()
    assert each.ends() == 1
    assert each.outcome("runs")["status"] == "passed"
    (finding,) = each.outcome("queued")["attempts"][0]["findings"]
    assert "SIGKILL" in finding["message"]
    each.leaves_nothing(within_s=0.0)


def test_attempt_that_is_ended_from_elsewhere_has_not_passed(run, write_flow, gate):
    """An attempt that gets SIGTERM reports that it was interrupted. Where the run has not sent the signal, the flow
    is broken."""
    write_flow("runs", PASSES)
    each = run("--on", "local")
    gate.wait(1, cycle=0)
    os.kill(each.attempt_pid("runs"), signal.SIGTERM)
    assert each.ends() == 1
    runs = each.outcome("runs")
    assert runs["status"] == "broken"
    assert "ended by a signal that this run has not sent" in runs["attempts"][0]["findings"][0]["message"]
    each.leaves_nothing(within_s=0.0)


@pytest.mark.slurm
def test_on_a_sites_slurm_no_job_of_a_killed_run_stays_in_the_queue(run, two_flows, healthy_cluster, tmp_path):
    """When the harness and its attempts are killed, the guard cancels the running and the pending job, and no
    other."""
    env = healthy_cluster.environment()
    other = sbatch(healthy_cluster, tmp_path)
    each = run("--on", "slurm", env=env)
    in_the_middle(each, two_flows)
    for pid in (each.process.pid, each.attempt_pid("runs"), each.attempt_pid("queued")):
        os.kill(pid, signal.SIGKILL)
    each.process.communicate()
    until(lambda: queue(healthy_cluster) == [other], "only the other job to be in the queue")
    each.leaves_nothing(within_s=60.0)


@pytest.mark.slurm
def test_without_its_guard_the_lease_ends_the_job_of_a_killed_run(run, write_flow, gate, healthy_cluster):
    """Harness, attempt and guard are killed at once, as on a machine that is lost: the job ends when its lease
    lapses."""
    write_flow("runs", PASSES, job={"nodes": 2}, on=["slurm"])
    each = run("--on", "slurm", env=healthy_cluster.environment())
    gate.wait(2, cycle=0, timeout=60.0)
    everybody = (guard_of(each), each.attempt_pid("runs"), each.process.pid)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # SIGSTOP first, so that none reacts to another's death
        for pid in everybody:
            os.kill(pid, number)
    each.process.communicate()
    until(lambda: queue(healthy_cluster) == [], "an empty queue")
    (result,) = each.artifacts.glob("runs/*/jobs/*/result.json")
    assert "lease has lapsed" in json.loads(result.read_text())["reason"]


def guard_of(each: Run) -> int:
    for pid, process in read_table().items():
        if (
            process.parent == each.process.pid
            and "nvrx_slurm.lab.flow.guard" in Path(f"/proc/{pid}/cmdline").read_text()
        ):
            return pid
    raise AssertionError("the run has no guard")


def queue(cluster: DevCluster) -> list[str]:
    """The ids of all jobs in the cluster's queue."""
    command = ["squeue", "--noheader", "--format=%i"]
    done = subprocess.run(
        command, env={**os.environ, **cluster.environment()}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def sbatch(cluster: DevCluster, folder: Path) -> str:
    """Submit a job that is not of the run, held in the queue; returns its id."""
    return ask(cluster, "sbatch", "--parsable", "--hold", f"--output={folder}/other.out", "--wrap", "true").strip()


def ask(cluster: DevCluster, *command: str) -> str:
    env = {**os.environ, **cluster.environment()}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
