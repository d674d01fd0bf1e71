"""The command line. Each command is a module here; this one names them and imports none until it is called."""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

import click

from nvrx_slurm.errors import EXIT_INTERRUPTED, NvrxError

# name → (attribute in nvrx_slurm.cli.<module>, what `--help` says)
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("init:init", "Write a commented job.yaml to start from."),
    "render": ("render:render", "Print the sbatch script of a job."),
    "submit": ("submit:submit", "Submit a job to Slurm; prints its id."),
    "run": ("run:run", "Run a job here, in the foreground, without Slurm."),
    "status": ("status:status", "Nodes and ranks, cycle, spares, last failure and decision."),
    "logs": ("logs:logs", "Output of the ranks, by rank and cycle."),
    "dump": ("dump:dump", "Stacks of live workers now, without stopping them."),
    "events": ("events:events", "The journal of a job."),
    "wait": ("wait:wait", "Wait for a job; exits with its exit code."),
    "cancel": ("cancel:cancel", "Cancel a job."),
    "config": ("config:config", "Show the merged configuration, or its JSON Schema."),
    "cluster": ("cluster:cluster", "A real Slurm on this machine, without root."),
    "completion": ("completion:completion", "Shell completion for bash, zsh or fish."),
}


class _LazyGroup(click.Group):
    """A group that imports a command's module when the command is called, so that `--help` stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name][0].split(":")
        loaded = getattr(importlib.import_module(f"nvrx_slurm.cli.{module}"), attribute)
        assert isinstance(loaded, click.Command)
        return loaded

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nvrx-slurm")
def cli() -> None:
    """Keep long multi-node Slurm jobs alive: hot spares, fast restarts, one journal that says why."""


def main() -> NoReturn:
    """The entry point: every error of ours is one message on stderr and its exit code, never a traceback."""
    try:
        code = cli.main(standalone_mode=False, prog_name="nvrx-slurm")
    except NvrxError as error:
        click.echo(f"nvrx-slurm: error: {error}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)
