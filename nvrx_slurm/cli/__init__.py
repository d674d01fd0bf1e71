"""The command line. Each command is a module here; this one names them and imports none until it is called."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from nvrx_slurm.cli.lazy import LazyGroup
from nvrx_slurm.errors import EXIT_INTERRUPTED, NvrxError
from nvrx_slurm.jobspec import env
from nvrx_slurm.util.sanitize import shown
from nvrx_slurm.util.terminal import guard, is_unread

# name → (attribute in nvrx_slurm.cli.<module>, what `--help` says)
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("init:init", "Write a commented job.yaml to start from."),
    "render": ("render:render", "Print the sbatch script of a job."),
    "submit": ("submit:submit", "Submit a job to Slurm; prints its id."),
    "run": ("run:run", "Run a job here, in the foreground, without Slurm."),
    "status": ("status:status", "Nodes and ranks, cycle, spares, last failure and decision."),
    "logs": ("logs:logs", "Output of the ranks, by rank and cycle."),
    "explain": ("explain:explain", "Why a job failed, and what was done about it."),
    "analyze": ("analyze:analyze", "The same analysis on any logs, offline."),
    "attribution": ("attribution:attribution", "What the verdicts were worth."),
    "dump": ("dump:dump", "Stacks of live workers now, without stopping them."),
    "events": ("events:events", "The journal of a job."),
    "wait": ("wait:wait", "Wait for a job; exits with its exit code."),
    "cancel": ("cancel:cancel", "Cancel a job."),
    "config": ("config:config", "Show the merged configuration, or its JSON Schema."),
    "nodes": ("nodes:nodes", "Nodes that evidence speaks against."),
    "attrsvc": ("attrsvc:attrsvc", "Attribution as a service, for a fleet of jobs."),
    "mcp": ("mcp:mcp", "The same tools for an AI assistant."),
    "store": ("store:store", "What a site's own store must allow its users."),
    "transport": ("transport:transport", "What this node can do for payloads."),
    "cluster": ("cluster:cluster", "A real Slurm on this machine, without root."),
    "ci": ("ci:ci", "Process flows, faults included, replayed on a real Slurm."),
    "completion": ("completion:completion", "Shell completion for bash, zsh or fish."),
}


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
