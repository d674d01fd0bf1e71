"""`nvrx-slurm exec`, `restart`, `drain` and `undrain`: what a user has a running job do."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nvrx_slurm.cli.completion import complete_job_or_node, complete_ranks, complete_replicas
from nvrx_slurm.cli.job_argument import chosen_job, job_argument, with_find_job
from nvrx_slurm.cli.options import duration_option, folder_option
from nvrx_slurm.cli.output import note
from nvrx_slurm.errors import UsageError
from nvrx_slurm.util.sanitize import one_line

if TYPE_CHECKING:
    from nvrx_slurm.api.user_request import UserRequest
    from nvrx_slurm.journal.records import RestartOrdered

_F = TypeVar("_F", bound=Callable[..., Any])

timeout_option = duration_option("--timeout", "Give up waiting (exit code 124) after this long.", "30s")
wait_option = click.option("--wait", is_flag=True, help="Return once the workers run again.")


def node_argument(command: _F) -> _F:
    """Give a command the arguments [JOB] NODE and the option --folder; it is called as by `job_argument`, with
    `node: str` too."""

    @click.argument("words", metavar="[JOB] NODE", nargs=-1, shell_complete=complete_job_or_node)
    @folder_option
    @functools.wraps(command)
    def wrapper(*args: Any, words: tuple[str, ...], folder: Path, **rest: Any) -> Any:
        if not 1 <= len(words) <= 2:
            raise UsageError("name a node, and before it the job if it is not the newest")
        job_id, folder = chosen_job(words[0] if len(words) == 2 else None, folder)
        return command(*args, job_id=job_id, node=words[-1], folder=folder, **rest)

    wrapper.__doc__ = with_find_job(command.__doc__)
    return wrapper  # type: ignore[return-value]


@click.command()
@job_argument
@click.option(
    "--replica", shell_complete=complete_replicas, help="One replica, such as rollout-3. Without it: all that run."
)
@wait_option
@timeout_option
def restart(job_id: str, replica: str | None, wait: bool, timeout: float, folder: Path) -> None:
    """Start the workers of a running job again, on the same nodes.

    They are stopped as after a failure (SIGTERM, the grace, SIGKILL) and begin at their newest checkpoint. No budget
    counts it, and no source of attribution is asked.
    """
    with closing(_request(folder, job_id)) as request:
        _go_on(request, request.restart(replica, timeout, note), timeout if wait else None)


@click.command()
@node_argument
@click.option("--force", is_flag=True, help="Go on with fewer nodes, down to min_nodes, where no spare is left.")
@wait_option
@timeout_option
def drain(job_id: str, node: str, force: bool, wait: bool, timeout: float, folder: Path) -> None:
    """Move the ranks of NODE to a hot spare by a restart, and assign NODE no further ranks.

    The node stays in the allocation, until the job ends or `undrain`. Without a spare the job refuses. A drain is
    taken back if the spare is lost before it has the ranks.
    """
    with closing(_request(folder, job_id)) as request:
        ordered = request.drain(node, timeout, note, force=force)
        click.echo(f"{node} is drained" + ("" if ordered else ": it has no ranks to move"))
        info = request.folder.read_info()
        if info is not None and info.cluster == "slurm" and info.nodes[:1] == (node,):
            note(f"the job's batch host runs on {node} too: the job ends if that node goes away")
        _go_on(request, ordered, timeout if wait else None)


@click.command()
@node_argument
@timeout_option
def undrain(job_id: str, node: str, timeout: float, folder: Path) -> None:
    """Allow ranks on NODE again: it becomes a hot spare. A node that is lost becomes one when it is back."""
    with closing(_request(folder, job_id)) as request:
        request.undrain(node, timeout, note)
        click.echo(f"{node} may get ranks again")


class CommandLine(click.Command):
    """Takes what stands behind `--` for itself: without JOB the command's first word would be taken for it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Before click parses: it drops the `--`, and then nothing separates the command from JOB.
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["argv"] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "-- COMMAND [ARGS]..."]


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command("exec", cls=CommandLine)
@job_argument
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    required=True,
    shell_complete=complete_ranks,
    help="Beside the worker of this rank.",
)
@click.option("--replica", shell_complete=complete_replicas, help="Whose rank, in a job with several replicas.")
@timeout_option
@click.pass_context
def run_beside(
    ctx: click.Context, job_id: str, rank: int, replica: str | None, timeout: float, folder: Path
) -> int | None:
    """Run a command on the node of a rank, in the environment, the folder and the container of its worker.

    Its output comes here as it is printed, and its exit code is this command's (128 + n after signal n). Standard
    input is empty. Ctrl-C is passed on; a second one ends it. It ends when this command does, and when the job stops
    the workers of the cycle that runs now. The journal keeps who ran what.

        nvrx-slurm exec --rank 3 -- nvidia-smi
    """
    from nvrx_slurm.api.command_request import CommandRequest
    from nvrx_slurm.errors import EXIT_INTERRUPTED
    from nvrx_slurm.report.jobs import find_job

    argv = ctx.meta["argv"]
    if not argv:
        raise UsageError("name the command after --: nvrx-slurm exec --rank 3 -- nvidia-smi")
    with closing(CommandRequest(find_job(folder, job_id))) as request:
        seen: list[int] = []

        def on_signal(number: int, _: object) -> None:
            seen.append(number)
            # The first Ctrl-C is the command's. Before it has begun there is none to pass it on to.
            if number == signal.SIGINT and len(seen) == 1 and request.has_begun:
                request.signals.append(number)
            else:
                request.leaves = True

        def out(data: bytes, is_error: bool) -> None:
            stream = sys.stderr.buffer if is_error else sys.stdout.buffer
            stream.write(data)
            stream.flush()

        # From here on: before the request is posted a signal ends this command as any other.
        before = {number: signal.signal(number, on_signal) for number in SIGNALS}
        try:
            end = request.run(argv, rank, replica, out, timeout, note)
        except KeyboardInterrupt:  # the user has left before the controller answered
            end = None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if end is None:
        # The last signal: the first Ctrl-C went to the command, and did not end this one.
        return EXIT_INTERRUPTED if seen[-1] == signal.SIGINT else 128 + seen[-1]
    return end.exit_code if end.signal is None else 128 + end.signal


def _request(folder: Path, job_id: str) -> UserRequest:
    from nvrx_slurm.api.user_request import UserRequest
    from nvrx_slurm.report.jobs import find_job

    return UserRequest(find_job(folder, job_id))


def _go_on(request: UserRequest, ordered: list[RestartOrdered], bound_s: float | None) -> None:
    """Say what restarts; with a bound also when it runs again."""
    for each in ordered:
        click.echo(one_line(f"{each.replica} restarts: cycle {each.cycle} ends, cycle {each.cycle + 1} follows"))
    if bound_s is None:
        return
    request.wait(ordered, bound_s, note)
    for each in ordered:
        replica = request.view.replicas[each.replica]
        click.echo(one_line(f"{replica.id} is {replica.phase} in cycle {replica.cycle}"))
