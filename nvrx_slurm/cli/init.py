"""`nvrx-slurm init`"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import click

from nvrx_slurm.errors import UsageError


@click.command()
@click.argument("path", type=click.Path(path_type=Path), default="job.yaml")
@click.option("--roles", is_flag=True, help="A job with several kinds of workers.")
@click.option("--force", is_flag=True, help="Overwrite a file that exists.")
def init(path: Path, roles: bool, force: bool) -> None:
    """Write a commented job.yaml to start from."""
    name = "roles.yaml" if roles else "plain.yaml"
    text = (resources.files("nvrx_slurm.jobspec") / "templates" / name).read_text()
    try:
        with path.open("w" if force else "x") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists; name another file, or overwrite it with --force") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    click.echo(f"{path} is written. Try it here with `nvrx-slurm run {path}`, then `nvrx-slurm submit {path}`.")
