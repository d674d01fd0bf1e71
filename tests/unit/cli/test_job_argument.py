"""JOB on the command line: an id, or nothing, from any folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from nvrx_slurm.cli import cli
from nvrx_slurm.journal.folder import Result
from nvrx_slurm.journal.job_index import record_job
from tests.unit.cli.conftest import Nvrx
from tests.unit.report.recorder import ended, with_one_recovery, write


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_without_job_a_command_takes_the_newest(nvrx: Nvrx, tmp_path: Path, state: None) -> None:
    """The newest job may be in any folder; stderr names it, and stdout has the answer alone."""
    write(tmp_path / "nvrx-jobs", ended(), job="old")
    record_job(write(tmp_path / "elsewhere", with_one_recovery(), job="new").path)
    named = nvrx("events", "new")
    assert (named.returncode, named.stderr) == (0, "")
    newest = nvrx("events")
    assert newest.stdout == named.stdout
    assert newest.stderr == f"nvrx-slurm: job new, the newest, in {tmp_path / 'elsewhere'}\n"
    assert nvrx("events", "last").stdout == named.stdout
    assert nvrx("status", "last", "--json").stdout.count('"job": "new"') == 1
    here = nvrx("events", "--folder", "nvrx-jobs")
    assert here.stdout == nvrx("events", "old").stdout != named.stdout


def test_id_of_an_allocation_is_its_newest_run(nvrx: Nvrx, tmp_path: Path, state: None) -> None:
    """Users know the id that Slurm gave the allocation; the job that ran in it has its own id."""
    for run, events in (("7-run1", ended()), ("7-run2", with_one_recovery()), ("77-run1", ended())):
        record_job(write(tmp_path / "nvrx-jobs", events, job=run).path)
    found = nvrx("events", "7")
    assert found.stdout == nvrx("events", "7-run2").stdout
    assert found.stderr == "nvrx-slurm: job 7-run2, the newest run in the allocation 7\n"


def test_status_without_job_lists_the_folder_as_before(nvrx: Nvrx, tmp_path: Path, state: None) -> None:
    """`status` lists no job of another folder, and does not choose the newest."""
    write(tmp_path / "nvrx-jobs", ended(), job="old")
    record_job(write(tmp_path / "elsewhere", ended(), job="new").path)
    done = nvrx("status")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["JOB", "old"]
    assert done.stderr == ""


def test_a_variable_names_the_folder(nvrx: Nvrx, tmp_path: Path, state: None) -> None:
    """It acts as --folder does, which takes precedence; it is no key of job.yaml, and no other folder is searched for
    jobs."""
    write(tmp_path / "mine", ended(), job="a")
    record_job(write(tmp_path / "elsewhere", ended(), job="b").path)
    folder = str(tmp_path / "mine")
    assert nvrx("status", "--json", NVRX_SLURM_FOLDER=folder).stdout.count('"job": "a"') == 1
    assert nvrx("events", NVRX_SLURM_FOLDER=folder).stderr == f"nvrx-slurm: job a, the newest, in {folder}\n"
    assert nvrx("events", "b", NVRX_SLURM_FOLDER=folder).returncode == 2
    assert nvrx("events", "b", "--folder=elsewhere", NVRX_SLURM_FOLDER=folder).returncode == 0
    (tmp_path / "job.yaml").write_text("name: a\ncommand: x\n")
    rendered = nvrx("render", NVRX_SLURM_FOLDER=folder)
    assert (rendered.returncode, rendered.stderr) == (0, "")
    assert f'"folder": "{folder}"' in rendered.stdout


@pytest.mark.parametrize("command", ["report", "metrics", "wait", "drain"])
def test_the_paragraphs_of_a_help_text_have_one_margin(command: str) -> None:
    """That includes a sentence about JOB that is added to a docstring with another indentation."""
    text, _, _ = CliRunner().invoke(cli, [command, "--help"]).output.partition("Options:")
    _, *lines = filter(None, text.splitlines())
    assert {len(line) - len(line.lstrip()) for line in lines} == {2}


def test_a_job_that_two_words_name_is_taken_once(nvrx: Nvrx, tmp_path: Path, state: None) -> None:
    """Prometheus refuses metrics that have a series twice, and `rm` must not look for a job that it has removed."""
    write(tmp_path / "nvrx-jobs", ended(), job="7-run1").write_result(
        Result(exit_code=0, reason="done", ended_at=9.0)
    )
    names = ("7-run1", "last", "7", "7-run1")
    samples = [line.rpartition(" ")[0] for line in nvrx("metrics", *names).stdout.splitlines() if line[0] != "#"]
    assert len(samples) == len(set(samples)) > 10
    removed = nvrx("rm", *names)
    assert (removed.returncode, removed.stdout.count("7-run1")) == (0, 2), removed.stderr
