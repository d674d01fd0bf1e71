"""Alice's jobs neither run in nor change a folder that bob owns or can write to."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.journal.folder import JobFolder, JobInfo, StoreAddress
from nvrx_slurm.journal.sealed import SealedFolder
from nvrx_slurm.util.files import digest_of_plan
from tests.forks import run_command
from tests.slurm_harness import CLI

BOUND_S = 60
JOB_ID = "local-7"


def nvrx(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    own = dict.fromkeys(("XDG_CONFIG_HOME", "XDG_CONFIG_DIRS", "XDG_STATE_HOME"), str(cwd))  # an index of its own
    environment = {**os.environ, **own, **variables}
    return run_command(arguments, cwd=cwd, env=environment, timeout=BOUND_S)


def one_error(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Assert one line of error, no traceback, and exit code 2."""
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(("nvrx-slurm: error: ", "nvrx-slurm agent: error: "))
    for word in words:
        assert word in lines[0]
    assert done.returncode == 2


@pytest.fixture
def project(common: Path) -> Path:
    """A project's folder with a job.yaml of alice's."""
    (common / "job.yaml").write_text(json.dumps({"name": "a", "command": "true"}))
    return common


def write_to(folder: str) -> str:
    """Prove that bob can write there."""
    try:
        (Path(folder) / "bobs").mkdir()
    except PermissionError:
        return "denied"
    return "written"


# ---- the base folder


@pytest.mark.parametrize("command", [["run"], ["submit", "--local"], ["render", "--local"]], ids=lambda c: c[0])
def test_a_base_folder_that_bob_can_write_to_is_refused(bob, project, command):
    """Before this check, the job ran there, and bob could replace its folder at any time."""
    base = project / "jobs"
    base.mkdir()
    base.chmod(0o777)
    assert bob.run(write_to, str(base)) == "written"
    one_error(
        nvrx(*command, "--folder", "jobs", cwd=project), "jobs: every user can write", "`chmod go-w ", "--folder"
    )
    assert [path.name for path in base.iterdir()] == ["bobs"]


def test_a_base_folder_of_bobs_is_refused(bob, project):
    """He could replace its content, with any mode of the folder."""
    project.chmod(0o1777)
    assert bob.run(make_folder, str(project / "jobs"), 0o777)
    done = nvrx("run", "--folder", "jobs", cwd=project)
    one_error(done, f"jobs: belongs to nobody (uid {bob.uid})", "--folder names a folder of your own")


def test_a_base_folder_that_its_group_can_write_to_is_refused_and_the_fix_helps(bob, project):
    """The usual mode of a project's folder is 2775. After the command that the error names, the job runs."""
    base = project / "jobs"
    base.mkdir()
    os.chown(base, -1, bob.uid)  # the group with the number of his uid, which bob.py gives him
    base.chmod(0o2775)
    done = nvrx("run", "--folder", "jobs", cwd=project)
    one_error(done, "every user of group ", "(mode 2775)", "`chmod g-w jobs`")
    subprocess.run(["chmod", "g-w", "jobs"], cwd=project, check=True)
    assert nvrx("run", "--folder", "jobs", cwd=project).returncode == 0


def test_a_folder_above_that_all_can_write_to_is_refused(project):
    """Bob could replace the base folder from there. In a sticky folder, as /tmp, he cannot."""
    project.chmod(0o777)
    done = nvrx("run", cwd=project)
    one_error(done, f"{project}: every user can write", f"`chmod go-w {project}`")
    project.chmod(0o1777)
    assert nvrx("run", cwd=project).returncode == 0


def test_a_folder_above_that_a_group_can_write_to_is_warned_of(bob, project):
    """Many sites have such folders on purpose, so this is a warning. A base folder that bob puts in place of alice's
    is his own, and is refused."""
    os.chown(project, -1, bob.uid)
    project.chmod(0o2775)
    done = nvrx("submit", "--local", cwd=project)
    assert done.returncode == 0
    assert done.stderr.count(f"{project}: its group can write to it") == 1
    job_id = done.stdout.strip()
    assert nvrx("wait", job_id, cwd=project).returncode == 0
    (project / "nvrx-jobs").rename(project / "moved")
    project.chmod(0o777)  # bob has joined the group
    assert bob.run(make_folder, str(project / "nvrx-jobs"), 0o755)
    project.chmod(0o2775)
    done = nvrx("run", cwd=project)
    assert done.returncode == 2
    assert f"nvrx-jobs: belongs to nobody (uid {bob.uid})" in done.stderr


# ---- the job folder


def make_folder(path: str, mode: int) -> bool:
    Path(path).mkdir()
    Path(path).chmod(mode)
    return True


def make_link(path: str, target: str) -> bool:
    Path(path).symlink_to(target)
    return True


def run_script(project: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the rendered script under a job id that bob can predict, as he can with Slurm's ids."""
    rendered = nvrx("render", "--local", cwd=project)
    assert rendered.returncode == 0, rendered.stderr
    return subprocess.run(
        ["bash", "-s"],
        input=rendered.stdout,
        env={**os.environ, "NVRX_JOB_ID": JOB_ID, **variables},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )


def test_a_link_under_a_job_id_that_can_be_guessed_changes_nothing_elsewhere(bob, project):
    """Before this check, alice's job changed the mode of the link's target, and removed its folder `store`."""
    base, hers = project / "nvrx-jobs", project / "hers"
    base.mkdir()
    base.chmod(0o1777)
    (hers / "store").mkdir(parents=True)
    (hers / "store" / "checkpoint").write_text("weeks of work")
    hers.chmod(0o755)
    assert bob.run(make_link, str(base / JOB_ID), str(hers))
    one_error(run_script(project), f"{base / JOB_ID}: is a symbolic link", "remove it")
    assert stat.S_IMODE(hers.stat().st_mode) == 0o755
    assert (hers / "store" / "checkpoint").read_text() == "weeks of work"


def test_a_job_folder_of_bobs_is_refused(bob, project):
    """He could read the store's password there, and write the plan."""
    base = project / "nvrx-jobs"
    base.mkdir()
    base.chmod(0o1777)
    assert bob.run(make_folder, str(base / JOB_ID), 0o777)
    one_error(run_script(project), f"{base / JOB_ID}: belongs to nobody (uid {bob.uid})")
    assert list((base / JOB_ID).iterdir()) == []


def serve_as_a_store(folder: str, plan: str) -> None:
    """Create a job folder with a plan of bob's, listen as its store, and print when a client connects."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        Path(folder).mkdir()
        Path(folder).chmod(0o755)
        url = f"redis://127.0.0.1:{server.getsockname()[1]}"
        info = {"job_id": "7", "name": "a", "cluster": "local", "started_at": 1.0, "nodes": ["n1"]}
        for name, record in (
            ("plan.json", json.loads(plan)),
            ("job.json", info),
            ("store.json", {"url": url, "password": "his", "job": "7", "token": "his"}),
        ):
            (Path(folder) / name).write_text(json.dumps(record))
        (Path(folder) / "nodes").mkdir()
        (Path(folder) / "nodes").chmod(0o777)
        print("ready", flush=True)
        server.accept()
        print("alice has come", flush=True)


@pytest.mark.parametrize("part", ["agent", "controller", "attribution"])
def test_nothing_of_alices_job_works_in_a_job_folder_that_bob_has_exchanged(bob, project, plan_json, part):
    """Before this check, her agent logged in at the store that bob's `store.json` named, and ran his plan's
    command."""
    project.chmod(0o1777)
    folder = project / "7"
    attack = bob.start(serve_as_a_store, str(folder), plan_json.decode())
    assert attack.line() == "ready"
    done = start(part, folder)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"{folder}: belongs to nobody (uid {bob.uid})" in done.stderr


@pytest.fixture
def plan_json(project: Path) -> bytes:
    script = nvrx("render", "--local", cwd=project).stdout
    return script.partition("<<'NVRX_PLAN'\n")[2].partition("\nNVRX_PLAN")[0].encode()


def start(part: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NVRX_JOB_FOLDER": str(folder), "NVRX_NODE": "n1", **variables}
    return subprocess.run(
        [sys.executable, "-P", "-m", f"nvrx_slurm.{part}"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )


@pytest.mark.parametrize("part", ["agent", "controller", "attribution"])
def test_a_plan_that_is_not_the_submitted_one_is_refused(tmp_path, plan_json, part):
    """The batch host has the plan from the job script, and passes its SHA-256 to the processes that it starts."""
    folder = JobFolder(tmp_path / "7")
    folder.create()
    folder.write_info(JobInfo(job_id="7", name="a", cluster="local", started_at=1.0, nodes=("n1",)))
    folder.write_store(StoreAddress(url="redis://127.0.0.1:1", password="p", job="7", token="t"))
    folder.write_plan_json(plan_json.replace(b'"true"', b'"evil"'))
    assert b"evil" in folder.plan_path.read_bytes()
    done = start(part, folder.path, NVRX_PLAN_SHA256=digest_of_plan(plan_json))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"{folder.plan_path}: is not the plan that this job was submitted with" in done.stderr


def test_bobs_jobs_are_passed_over_and_not_shown(bob, project, plan_json):
    """In a base folder of both users `status` lists only alice's jobs; asked for a job of bob's, it says that the
    folder is his."""
    base = project / "nvrx-jobs"
    assert run_script(project).returncode == 0
    base.chmod(0o1777)
    attack = bob.start(serve_as_a_store, str(base / "8"), plan_json.decode())
    assert attack.line() == "ready"
    listed = nvrx("status", "--json", cwd=project)
    assert [job["job"] for job in json.loads(listed.stdout)["jobs"]] == [JOB_ID]
    one_error(nvrx("status", "8", cwd=project), f"8: belongs to nobody (uid {bob.uid})")


# ---- modes


def test_no_umask_lets_others_write(tmp_path):
    """With umask 000, others can write to none of the files that a job leaves and to none of the folders that the
    tool makes."""
    (tmp_path / "job.yaml").write_text(json.dumps({"name": "a", "command": "echo hello", "nodes": 2}))
    command = [*CLI, "submit", "--local", "--wait", "--folder", "deep/er/jobs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=BOUND_S, umask=0)
    assert done.returncode == 0, done.stderr
    modes = {}
    for path in [tmp_path / "deep", *(tmp_path / "deep").rglob("*")]:
        with contextlib.suppress(FileNotFoundError):  # the batch host may still be removing the store
            modes[path] = path.lstat().st_mode
    assert {"plan.json", "job.log", "host.log", "job.sh", "rank-0.out", "n1.log"} <= {path.name for path in modes}
    assert {str(path): oct(mode) for path, mode in modes.items() if mode & 0o022} == {}


def test_what_others_have_put_under_a_files_name_is_not_read(tmp_path):
    """A job's record must be a plain file that only its owner can write to: no symbolic link, no pipe."""
    folder = JobFolder(tmp_path / "7")
    folder.create()
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text("{}")
    path = folder.path / "result.json"
    for put, says in (
        (lambda: path.symlink_to(elsewhere), "is no plain file"),
        (lambda: os.mkfifo(path), "is no plain file"),
        (lambda: (path.touch(), path.chmod(0o666)), "every user can write"),
    ):
        put()
        with pytest.raises(Exception, match=says):
            folder.read_result()
        path.unlink()


# ---- the cache of scripts


def test_a_cache_that_bob_has_replaced_is_not_used(bob, common):
    """Alice would submit his entry as her script: an entry's seal is a checksum, not a secret."""
    common.chmod(0o777)
    cache = SealedFolder(common / "scripts", 4)
    cache.put("name", b"hers")
    assert cache.get("name") == b"hers"
    (common / "scripts").rename(common / "moved")
    bob.run(plant_cache, str(common / "scripts"), "name")
    assert cache.get("name") is None
    cache.put("name", b"hers")  # writes nothing there either
    assert [path.lstat().st_uid for path in (common / "scripts").iterdir()] == [bob.uid]
    (common / "scripts" / "name").unlink()
    (common / "scripts").rmdir()
    (common / "scripts").symlink_to(common / "moved")
    assert cache.get("name") is None


def plant_cache(folder: str, name: str) -> None:
    Path(folder).mkdir(mode=0o700)
    cache = SealedFolder(Path(folder), 4)
    cache.put(name, b"his")
    assert cache.get(name) == b"his"
    Path(folder).chmod(0o777)
