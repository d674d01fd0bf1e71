"""Where a token may come from, and what is said of one that may not be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvrx_slurm.attribution.http_client import token_of
from nvrx_slurm.errors import ConfigError

KEY = "fault_tolerance.attribution.slack.token_file"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("xoxb-1\n")
    path.chmod(0o600)
    return path


def test_a_file_comes_before_the_environment(file: Path) -> None:
    """Its line end is no part of the token."""
    assert token_of(str(file), "xoxb-2", key=KEY) == "xoxb-1"
    assert token_of(None, " xoxb-2", key=KEY) == "xoxb-2"
    assert token_of(None, None, key=KEY) is None


def test_a_file_is_read_each_time(file: Path) -> None:
    """A token that is replaced while a job runs for weeks is used."""
    token_of(str(file), None, key=KEY)
    file.write_text("xoxb-3")
    assert token_of(str(file), None, key=KEY) == "xoxb-3"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620])
def test_a_file_that_others_can_open_is_refused(file: Path, mode: int) -> None:
    """The error names the file, its mode and the way out."""
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"token: {KEY}: .*mode 0{mode:o}.*chmod 600") as caught:
        token_of(str(file), "xoxb-2", key=KEY)
    assert "xoxb" not in str(caught.value)


@pytest.mark.parametrize("content", ["", " \n", "two\nlines", "tükén", "a\x00b", "x" * 9000])
def test_a_file_that_holds_no_token_is_refused(file: Path, content: str) -> None:
    """What it holds is not shown: it may be half of one."""
    file.write_text(content)
    with pytest.raises(ConfigError, match="holds no token") as caught:
        token_of(str(file), None, key=KEY)
    assert not content.strip() or content not in str(caught.value)


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    """A folder, or nothing at all."""
    for place in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=KEY):
            token_of(str(place), None, key=KEY)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Nobody may ever write to it."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="no plain file"):
        token_of(str(tmp_path / "pipe"), None, key=KEY)
