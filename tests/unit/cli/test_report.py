"""`report`, `trace` and `metrics`, for jobs that run or have ended, for a torn or old journal, and for no job."""

from __future__ import annotations

import base64
import gzip
import re
from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import RENAMED_EVENTS
from tests.jobs import HOSTILE, eventful
from tests.unit.cli.conftest import Nvrx
from tests.unit.report.recorder import JOB, Recorder, ended, plain_plan, with_one_recovery, write


def data_of(page: Path) -> dict:
    """The data that the script of a page reads."""
    packed = re.search(rb'id="data">([^<]*)<', page.read_bytes())
    assert packed is not None
    return msgspec.json.decode(gzip.decompress(base64.b64decode(packed[1])))


@pytest.fixture
def reported(nvrx: Nvrx, tmp_path: Path):
    """Writes the report of a job in `tmp_path`; returns its path."""

    def reported(*words: str) -> Path:
        out = tmp_path / "report.html"
        done = nvrx("report", *words, "-o", str(out), "--folder", str(tmp_path))
        assert done.stdout == f"{out}\n"
        return out

    return reported


def test_the_report_of_an_ended_job(reported, tmp_path: Path) -> None:
    """It is one file, for this user alone, with every entry of the journal."""
    recorder = ended()
    write(tmp_path, recorder)
    page = reported(JOB)
    assert page.stat().st_mode & 0o777 == 0o600
    assert len(data_of(page)["sentence"]) == len(recorder.entries)
    assert b"100.0 %" in page.read_bytes()


def test_the_report_of_a_running_job_shows_how_it_stands(reported, tmp_path: Path) -> None:
    """The job's host is another one, so the job may run: the page says up to which time it counts."""
    write(tmp_path, with_one_recovery())
    assert b"it stood at" in reported(JOB).read_bytes()


def test_the_report_of_a_torn_journal_shows_what_is_there(reported, tmp_path: Path) -> None:
    """Half a line in the middle and one at the end are skipped."""
    folder = write(tmp_path, ended())
    lines = folder.events_path.read_bytes().splitlines(keepends=True)
    folder.events_path.write_bytes(b"".join(lines[:-3]) + lines[-3][:20] + b"\n" + lines[-2] + lines[-1][:10])
    assert len(data_of(reported(JOB))["sentence"]) == len(lines) - 2


def test_the_report_of_an_older_versions_journal(reported, tmp_path: Path) -> None:
    """The journal has names of events of version 0.1, and an event that this version does not know."""
    folder = write(tmp_path, ended())
    old = folder.events_path.read_bytes()
    for before, now in RENAMED_EVENTS.items():
        old = old.replace(f'"event":"{now}"'.encode(), f'"event":"{before}"'.encode())
    folder.events_path.write_bytes(old + b'{"n":9999,"t":1790000300.0,"event":"from_the_future"}\n')
    assert "rendezvous_closed" in data_of(reported(JOB))["events"]


def test_the_report_of_a_job_without_a_journal(reported, tmp_path: Path) -> None:
    """The job was submitted, and nothing has happened: the page has its configuration."""
    folder = JobFolder(tmp_path / JOB)
    folder.create()
    folder.write_plan(plain_plan())
    page = reported(JOB).read_bytes()
    assert b"no entry yet" in page
    assert b"nodes_per_replica" in page


def test_a_job_that_is_not_there_is_one_error(nvrx: Nvrx, tmp_path: Path) -> None:
    for command in ("report", "trace", "metrics"):
        done = nvrx(command, "0815", "--folder", str(tmp_path))
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1 and "no job '0815'" in done.stderr


def test_a_page_that_cannot_be_written_is_one_error(nvrx: Nvrx, tmp_path: Path) -> None:
    write(tmp_path, ended())
    out = tmp_path / "nowhere" / "report.html"
    done = nvrx("report", JOB, "-o", str(out), "--folder", str(tmp_path))
    assert done.returncode == 2
    assert f"{out}: the page cannot be written there: No such file or directory" in done.stderr


def test_values_of_variables_are_not_shown(reported, tmp_path: Path) -> None:
    """A token in the environment of the workers is not on the page."""
    recorder = Recorder(plain_plan())
    role = msgspec.structs.replace(recorder.plan.roles[0], env={"HF_TOKEN": "hf_geheim"})
    recorder.plan = msgspec.structs.replace(recorder.plan, roles=(role,))
    write(tmp_path, recorder)
    page = reported(JOB).read_bytes()
    assert b"HF_TOKEN" in page
    assert b"hf_geheim" not in page
    assert "hf_geheim" not in str(data_of(tmp_path / "report.html"))


def test_origins_are_shown_as_the_submission_recorded_them(reported, tmp_path: Path) -> None:
    folder = write(tmp_path, ended())
    folder.write_origins({"nodes": ("4", "job.yaml:3"), "env.HF_TOKEN": ('"hf_geheim"', "job.yaml:9")})
    page = reported(JOB).read_bytes()
    assert b"job.yaml:3" in page
    assert b"hf_geheim" not in page


def test_a_link_in_the_place_of_stacks_is_not_followed(reported, tmp_path: Path) -> None:
    """Pages are passed on: a worker must not be able to make one include another file."""
    folder = write(tmp_path, eventful())
    secret = tmp_path / "id_rsa"
    secret.write_text("PRIVATE KEY")
    (folder.path / "stacks/main-0").mkdir(parents=True)
    (folder.path / "stacks/main-0/rank-3.txt").symlink_to(secret)
    assert b"PRIVATE KEY" not in reported(JOB).read_bytes()


def test_the_trace_is_written(nvrx: Nvrx, tmp_path: Path) -> None:
    """The text that a job has printed stays text in it."""
    write(tmp_path, eventful())
    out = tmp_path / "trace.json"
    assert nvrx("trace", JOB, "-o", str(out), "--folder", str(tmp_path)).stdout == f"{out}\n"
    names = [event["name"] for event in msgspec.json.decode(out.read_bytes())["traceEvents"]]
    assert any(HOSTILE[:20] in name for name in names)


def test_a_run_records_its_origins(nvrx: Nvrx, tmp_path: Path) -> None:
    """Each key has the flag or the line that set it; the value of a variable is left out."""
    (tmp_path / "job.yaml").write_text("name: a\ncommand: 'true'\nnodes: 1\nenv: {HF_TOKEN: hf_geheim}\n")
    done = nvrx("run", "--here", "--quiet", "--spares", "0", "job.yaml", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / "nvrx-jobs").iterdir()
    origins = JobFolder(folder).read_origins()
    assert origins is not None
    assert (origins["nodes"], origins["spares"]) == (("1", "job.yaml:3"), ("0", "--spares"))
    assert origins["env.HF_TOKEN"] == ("null", "job.yaml:4")
    assert "hf_geheim" not in (folder / "origins.json").read_text()
