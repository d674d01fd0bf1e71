"""The command line: the table of its commands, and how one ends. A command's module is imported when it is called."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import click

from nvrx_slurm.errors import EXIT_INTERRUPTED, EXIT_USAGE, NvrxError
from nvrx_slurm.jobspec import env
from nvrx_slurm.util.sanitize import shown
from nvrx_slurm.util.terminal import drop_output, guard, is_unread, open_missing

# in the order of a job's life, as `--help` lists them; see `LazyGroup`
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo:demo", "See a job survive the loss of a node, on this machine."),
    "init": ("config:init", "Write a commented job.yaml to start from."),
    "render": ("config:render", "Print the sbatch script of a job."),
    "submit": ("submit:submit", "Submit a job to Slurm; prints its id."),
    "run": ("run:run", "Run a job in the foreground: here, or in your allocation."),
    "ls": ("jobs:ls", "Your jobs, of all folders."),
    "status": ("status:status", "Nodes and ranks, cycle, spares, last failure and decision."),
    "report": ("report:report", "A job, or all jobs, as one HTML page that opens offline."),
    "trace": ("report:trace", "A trace of a job, for Perfetto."),
    "metrics": ("metrics:metrics", "Jobs as metrics, for Prometheus."),
    "top": ("top:top", "Jobs and their ranks on a live screen."),
    "logs": ("logs:logs", "Output of the ranks, by rank and cycle."),
    "explain": ("analyze:explain", "Why a job failed, and what was done about it."),
    "analyze": ("analyze:analyze", "Find why a job failed from any logs, offline."),
    "attribution": ("attribution:attribution", "Precision of the verdicts; resend notifications."),
    "dump": ("status:dump", "Stacks of live workers now, without stopping them."),
    "exec": ("control:run_beside", "Run a command beside a rank, in its environment."),
    "restart": ("control:restart", "Start the workers of a running job again, now."),
    "drain": ("control:drain", "Move a node's ranks to a hot spare; assign it none."),
    "undrain": ("control:undrain", "Allow ranks on a drained node again."),
    "events": ("logs:events", "The journal of a job."),
    "wait": ("submit:wait", "Wait for a job; exits with its exit code."),
    "cancel": ("submit:cancel", "Cancel a job."),
    "rm": ("jobs:rm", "Remove the folders of jobs that have ended."),
    "config": ("config:config", "Show the merged configuration or the JSON Schema."),
    "nodes": ("nodes:nodes", "Suspect nodes, and the evidence."),
    "attrsvc": ("attrsvc:attrsvc", "Attribution as a service, for a fleet of jobs."),
    "mcp": ("attribution:mcp", "Failure analysis for AI assistants (MCP server)."),
    "store": ("store:store", "ACL users for a Redis or Valkey of the site."),
    "doctor": ("doctor:doctor", "What this site's settings mean for a job."),
    "transport": ("transport:transport", "Check payload transports on this node; clean up."),
    "cluster": ("cluster:cluster", "A real Slurm on this machine, without root."),
    "ci": ("ci:ci", "Test that jobs recover: flows with real faults; simulation."),
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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self._commands_in and not args[0].startswith("-"):
            from nvrx_slurm.cli.advice import about_command

            if advice := about_command(args[0], self._commands_in):
                ctx.fail(f"No such command {args[0]!r}. {advice}")
        return super().resolve_command(ctx, args)

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
    """The entry point: every NvrxError and OSError is one message on stderr and its exit code, never a traceback."""
    # First: the guard wraps streams that are there.
    open_missing()
    guard(in_actions=env.github() is not None)
    starts_plain = signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # by `__main__`
    try:
        if starts_plain:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        # Else click ends the process itself: with 1 for Ctrl-C, and without the exit code that a command returns.
        code = cli.main(standalone_mode=False, prog_name="nvrx-slurm")
        sys.stdout.flush()  # Python does so at its end, and makes exit code 120 of what that raises
    except NvrxError as error:
        click.echo(f"nvrx-slurm: error: {shown(str(error))}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort, BrokenPipeError):
        if is_unread(sys.stdout):
            drop_output()
        # Under `python -m` CPython ends by SIGINT where a KeyboardInterrupt has left the last exec() of a string, and
        # was caught since (`unhandled_keyboard_interrupt`). An import makes such calls, one for each dataclass.
        exec("")
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:  # the disk is full to which standard output goes, say
        with contextlib.suppress(OSError):
            drop_output()
            click.echo(f"nvrx-slurm: error: {shown(str(error))}", err=True)
        sys.exit(EXIT_USAGE)  # as for a file of `-o`: 1 stands for a job that has failed
    finally:
        if starts_plain:  # the end of the interpreter would print a traceback, too
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code if isinstance(code, int) else 0)
