"""Folders that cannot be entered, and names that no file can have: one message, and exit code 2."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from nvrx_slurm.cli import cli
from nvrx_slurm.errors import EXIT_USAGE, ConfigError, NvrxError

TOO_LONG = "x" * 256


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job.yaml and the folder `closed`. Root can enter every folder, so the kernel's refusal is
    simulated."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "job.yaml").write_text("name: a\ncommand: x\n")
    closed = tmp_path / "closed"
    closed.mkdir()

    def refusing(answer: Callable[..., object]) -> Callable[..., object]:
        def ask(path: object, *args: object, **flags: object) -> object:
            if isinstance(path, (str, Path)) and closed in Path(path).absolute().parents:
                raise PermissionError(13, "Permission denied", str(path))
            return answer(path, *args, **flags)

        return ask

    for name in ("stat", "lstat", "mkdir", "open", "listdir", "scandir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    return tmp_path


@pytest.mark.parametrize("folder", ["closed/jobs", TOO_LONG])
@pytest.mark.parametrize(
    "command",
    ["run", "submit --local", "render", "status 1", "status --watch 1", "events 1", "wait 1", "rm 1", "cancel 1"],
)
def test_a_base_folder_that_cannot_be_entered_is_a_usage_error(here: Path, folder: str, command: str) -> None:
    ended = CliRunner().invoke(cli, [*command.split(), "--folder", folder])
    assert isinstance(ended.exception, NvrxError), ended.exc_info
    assert ended.exception.exit_code == EXIT_USAGE


@pytest.mark.parametrize("folder", ["closed/jobs", TOO_LONG])
def test_a_base_folder_that_cannot_be_entered_holds_no_jobs(here: Path, folder: str) -> None:
    assert CliRunner().invoke(cli, ["ls", "--folder", folder]).exception is None


@pytest.mark.parametrize("folder", ["closed", TOO_LONG])
def test_a_site_file_that_cannot_be_reached_is_an_error(
    here: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """The site file may have settings that the job needs, so it does not count as missing."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / folder))
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(cli, ["render"], catch_exceptions=False, standalone_mode=False)
    assert caught.value.file == str(here / folder / "nvrx-slurm" / "config.yaml")
