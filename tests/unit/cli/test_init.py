"""`nvrx-slurm init`"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from nvrx_slurm.cli.init import init
from nvrx_slurm.errors import EXIT_USAGE, UsageError
from nvrx_slurm.jobspec.load import load


def run(*arguments: str) -> str:
    result = CliRunner().invoke(init, arguments, standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.output


def test_it_writes_a_job_that_loads(tmp_path: Path) -> None:
    """What it writes is a valid job, plain or with roles, and it says what to do with it."""
    for flags, has_roles in (((), False), (("--roles",), True)):
        path = tmp_path / f"{has_roles}.yaml"
        said = run(str(path), *flags)
        assert f"`nvrx-slurm run {path}`" in said
        assert bool(load(path).spec.roles) is has_roles


def test_it_overwrites_only_when_told(tmp_path: Path) -> None:
    """A file that exists stays as it is, unless --force says otherwise."""
    path = tmp_path / "job.yaml"
    path.write_text("mine\n")
    with pytest.raises(UsageError, match=r"job.yaml exists; .* overwrite it with --force"):
        run(str(path))
    assert path.read_text() == "mine\n"
    run(str(path), "--force")
    assert load(path).spec.name == "train"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A missing folder, or a folder in the file's place, is one error."""
    for path in (tmp_path / "no" / "job.yaml", tmp_path):
        with pytest.raises(UsageError, match=f"^{path} ") as caught:
            run(str(path), "--force")
        assert caught.value.exit_code == EXIT_USAGE
