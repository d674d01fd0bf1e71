"""`nvrx-slurm completion`"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL.

    bash: put `eval "$(nvrx-slurm completion bash)"` into ~/.bashrc.
    """
    from nvrx_slurm.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "nvrx-slurm", "_NVRX_SLURM_COMPLETE").source())
