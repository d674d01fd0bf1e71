"""`nvrx-slurm ci`: the group; each of its commands is imported when it is called."""

from __future__ import annotations

import click

from nvrx_slurm.cli.lazy import LazyGroup

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("ci_run:run", "Run flows: jobs, real faults, and what their journals must say."),
    "check": ("ci_run:check", "Load flows and check them; run nothing."),
    "schema": ("ci_run:schema", "The JSON Schema of a flow file, for editors."),
    "clean": ("ci_run:clean", "End what a run that was killed has left behind."),
    "record": ("ci_tools:record", "Write a flow from a job that ran."),
    "replay": ("ci_tools:replay", "Feed a journal through the core again: the same decisions, or where they part."),
    "matrix": ("ci_tools:matrix", "Every fault that a job of yours should survive, as flows, and run them."),
    "simulate": ("simulate:simulate", "Seeded histories of faults, simulated, with every promise checked."),
}


@click.group(cls=LazyGroup, commands_in=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def ci() -> None:
    """Process flows, faults included, replayed on a real Slurm.

    \b
    nvrx-slurm ci run ci/flows
    nvrx-slurm ci run ci/flows --flow 'spare-*' --on local
    nvrx-slurm ci check ci/flows
    """
