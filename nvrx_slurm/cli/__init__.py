"""The command line: the table of its commands, and how one ends. A command's module is imported when it is called."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import click

from nvrx_slurm.errors import EXIT_INTERRUPTED, NvrxError
from nvrx_slurm.jobspec import env
from nvrx_slurm.util.sanitize import shown
from nvrx_slurm.util.terminal import guard, is_unread

# in the order of a job's life, as `--help` lists them; see `LazyGroup`
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("config:init", "Write a commented job.yaml to start from."),
    "render": ("config:render", "Print the sbatch script of a job."),
    "submit": ("submit:submit", "Submit a job to Slurm; prints its id."),
    "run": ("submit:run", "Run a job here, in the foreground, without Slurm."),
    "status": ("status:status", "Nodes and ranks, cycle, spares, last failure and decision."),
    "logs": ("logs:logs", "Output of the ranks, by rank and cycle."),
    "explain": ("analyze:explain", "Why a job failed, and what was done about it."),
    "analyze": ("analyze:analyze", "The same analysis on any logs, offline."),
    "attribution": ("attribution:attribution", "What the verdicts were worth."),
    "dump": ("status:dump", "Stacks of live workers now, without stopping them."),
    "events": ("logs:events", "The journal of a job."),
    "wait": ("submit:wait", "Wait for a job; exits with its exit code."),
    "cancel": ("submit:cancel", "Cancel a job."),
    "config": ("config:config", "Show the merged configuration, or its JSON Schema."),
    "nodes": ("nodes:nodes", "Nodes that evidence speaks against."),
    "attrsvc": ("attrsvc:attrsvc", "Attribution as a service, for a fleet of jobs."),
    "mcp": ("attribution:mcp", "The same tools for an AI assistant."),
    "store": ("store:store", "What a site's own store must allow its users."),
    "transport": ("transport:transport", "What this node can do for payloads."),
    "cluster": ("cluster:cluster", "A real Slurm on this machine, without root."),
    "ci": ("ci:ci", "Process flows, faults included, replayed on a real Slurm."),
    "completion": ("config:completion", "Shell completion for bash, zsh or fish."),
}


class LazyGroup(click.Group):
    """A group that imports a command's module when it is called, so that `--help` stays fast.

    `commands_in`: name → (`module:attribute` in `nvrx_slurm.cli`, what `--help` says).
    """

    def __init__(self, *args: Any, commands_in: Mapping[str, tuple[str, str]], **rest: Any) -> None:
        super().__init__(*args, **rest)
        self._commands_in = commands_in

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._commands_in)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self._commands_in:
            return None
        module, attribute = self._commands_in[name][0].split(":")
        loaded = getattr(importlib.import_module(f"nvrx_slurm.cli.{module}"), attribute)
        assert isinstance(loaded, click.Command)
        return loaded

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # click would end with 1, which stands for a job that has failed
            raise click.Abort from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self._commands_in.items()])


@click.group(cls=LazyGroup, commands_in=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nvrx-slurm")
def cli() -> None:
    """Keep long multi-node Slurm jobs alive: hot spares, fast restarts, one journal that says why."""


def main() -> NoReturn:
    """The entry point: every NvrxError is one message on stderr and its exit code, never a traceback."""
    guard(in_actions=env.github() is not None)
    try:
        code = cli.main(standalone_mode=False, prog_name="nvrx-slurm")
    except NvrxError as error:
        click.echo(f"nvrx-slurm: error: {shown(str(error))}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        if is_unread(sys.stdout):  # Python flushes stdout at its end, and makes exit code 120 of what that raises
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)
