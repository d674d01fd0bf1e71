"""Secrets in the environment of `submit` reach the process that needs them, and no process's environment in the
job."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from nvrx_slurm.api.handle import ClusterName, Job
from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec import env
from nvrx_slurm.journal.verdicts import Verdict
from nvrx_slurm.lab.faults.attribution_server import Asked, AttributionServer, PlannedResponse, says
from nvrx_slurm.util.secret_file import secret_in
from tests.slurm_harness import CLI, nvrx

BOUND_S = 60
MARK = f"correct-horse-{secrets.token_hex(8)}"  # a different one in each process of pytest-xdist
SECRETS = {name: f"{MARK}-{name.lower()}" for name in sorted(env.SECRETS)}
PARTS = (
    "nvrx_slurm.batch",
    "nvrx_slurm.controller",
    "nvrx_slurm.attribution",
    "-m nvrx_slurm.agent",
    "nvrx_slurm.agent.supervisor",
    "gate_worker.py",
)


class HeldService:
    """An attribution service that answers STOP to a client with the token, once the test allows it."""

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.server = AttributionServer(self._behave, token=SECRETS[env.ATTRSVC_TOKEN])

    def _behave(self, asked: Asked, server: AttributionServer) -> PlannedResponse | None:
        self.asked.set()
        self.may_answer.wait(BOUND_S)
        return says(Verdict.STOP)(asked, server)


@pytest.fixture
def service() -> Iterator[HeldService]:
    service = HeldService()
    yield service
    service.may_answer.set()
    service.server.close()


@pytest.fixture
def slurm_environment(request: pytest.FixtureRequest, cluster: ClusterName) -> Mapping[str, str]:
    return request.getfixturevalue("healthy_cluster").environment() if cluster == "slurm" else {}


def processes(folder: Path) -> dict[int, tuple[str, str]]:
    """The job's processes: command line and initial environment by pid."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environ = (path / "environ").read_bytes().decode(errors="replace")
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if MARK in environ or f"NVRX_JOB_FOLDER={folder}\0" in environ or "nvrx_slurm.batch" in command:
                found[int(path.name)] = (command, environ)
    return found


@pytest.mark.parametrize("cluster", ["local", pytest.param("slurm", marks=pytest.mark.slurm)])
def test_no_process_of_a_job_has_a_secret_in_its_environment(
    gate, service, tmp_path, cluster, slurm_environment, monkeypatch
):
    """All five secrets are set where the job is submitted. Before this was changed, `env` in a worker printed them.
    The attribution process still has its token: the service answers no other."""
    for name, value in slurm_environment.items():
        monkeypatch.setenv(name, value)
    attribution = {
        "http_urls": [service.server.url],
        "enable_lib": False,
        "dry_run": False,
        "decision_timeout": "50s",
    }
    job = {"name": "a", "command": list(gate.command), "fault_tolerance": {"attribution": attribution}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    flags = ["--local"] if cluster == "local" else []
    done = nvrx("submit", *flags, cwd=tmp_path, env=SECRETS)
    assert done.returncode == 0, done.stderr
    handle = Job(done.stdout.strip(), folder=tmp_path / "nvrx-jobs", cluster=cluster)
    gate.wait(1, cycle=0)
    running = processes(handle.folder)
    gate.wait(1, cycle=0)[0].go(exit_code=1)
    assert service.asked.wait(BOUND_S), (handle.folder / "nodes" / "attribution.log").read_text()
    running |= processes(handle.folder)
    service.may_answer.set()
    assert handle.wait(BOUND_S) == 93
    commands = [command for command, _ in running.values()]
    for part in PARTS:
        assert any(part in command for command in commands), (part, commands)
    assert [command for command, environ in running.values() if MARK in environ] == []
    read = set()
    for folder, _, names in os.walk(handle.folder):
        for path in (Path(folder, name) for name in names):
            with contextlib.suppress(FileNotFoundError):  # the batch host may still be removing the store
                assert not path.is_file() or MARK not in path.read_text(errors="replace"), path
                read.add(path)
    assert {handle.folder / "plan.json", handle.folder / "nodes" / "attribution.log"} <= read


def test_no_process_of_run_has_a_secret_in_its_environment(gate, tmp_path):
    """The same for the processes that a job in the foreground starts."""
    (tmp_path / "job.yaml").write_text(json.dumps({"name": "a", "command": list(gate.command)}))
    with subprocess.Popen([*CLI, "run"], cwd=tmp_path, env={**os.environ, **SECRETS}) as process:
        try:
            (worker,) = gate.wait(1, cycle=0).values()
            (folder,) = (tmp_path / "nvrx-jobs").glob("*/")
            running = processes(folder)
            worker.go()
            assert process.wait(BOUND_S) == 0
        finally:
            process.terminate()
    assert MARK in running.pop(process.pid)[1]  # the user set them there
    commands = [command for command, _ in running.values()]
    for part in set(PARTS) - {"nvrx_slurm.attribution"}:  # the attribution process may start later
        assert any(part in command for command in commands), (part, commands)
    assert [command for command, environ in running.values() if MARK in environ] == []


READ = (
    "from nvrx_slurm.jobspec import env; env.take_secrets();"
    " print(env.get(env.SLACK_TOKEN), env.get('NVRX_SECRETS_FD'))"
)


def test_secrets_are_handed_on_by_descriptor(monkeypatch):
    """A child that is started with the result of `handed_on` gets the secrets, and its environment does not contain
    them."""
    monkeypatch.setenv(env.SLACK_TOKEN, MARK)
    with env.handed_on() as (variables, descriptors):
        environment = env.child_environment(variables)
        assert MARK not in str(environment)
        for _ in range(2):  # each child reads the file from its beginning
            child = subprocess.run(
                [sys.executable, "-c", READ], env=environment, pass_fds=descriptors, capture_output=True, text=True
            )
            assert (child.stdout, child.stderr) == (f"{MARK} None\n", "")


@pytest.mark.parametrize("value", ["", "x", "999", "0"])
def test_a_descriptor_that_leads_nowhere_is_no_error(value):
    """A user may have set the variable. Then the process has no secrets."""
    child = subprocess.run(
        [sys.executable, "-c", READ],
        env={**env.child_environment({}), "NVRX_SECRETS_FD": value},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (child.stdout, child.stderr) == ("None None\n", "")


# ---- files that hold a secret


def test_a_password_file_that_others_can_read_is_refused(tmp_path):
    """As ssh refuses a private key. Before this check, the store's password file could have any mode."""
    password = tmp_path / "password"
    password.write_text(MARK)
    store = {"url": "redis://127.0.0.1:1", "password_file": str(password)}
    (tmp_path / "job.yaml").write_text(json.dumps({"name": "a", "command": "true", "store": store}))
    for mode, words in ((0o644, "can be read by others (mode 0644); `chmod 600` it"), (0o600, "does not answer")):
        password.chmod(mode)
        done = nvrx("submit", "--local", cwd=tmp_path, env={})
        assert done.returncode == (69 if mode == 0o600 else 2)
        assert words in done.stderr
        assert (done.stderr.count("\n"), MARK in done.stderr) == (1, False)


def test_a_secret_file_of_another_user_is_refused(bob, common):
    """Bob could make the job log in with a secret that he knows."""
    common.chmod(0o777)
    bob.run(write_secret, str(common / "token"))
    with pytest.raises(ConfigError, match=rf"belongs to nobody \(uid {bob.uid}\)"):
        secret_in(str(common / "token"), key="store.password_file")


def write_secret(path: str) -> None:
    Path(path).write_text("his")
    Path(path).chmod(0o600)
