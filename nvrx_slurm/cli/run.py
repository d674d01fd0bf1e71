"""`nvrx-slurm run`: a job in the foreground, on this machine or in the allocation that it is called in; and what the
keyboard and the terminal do to it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from types import FrameType
from typing import TYPE_CHECKING, Self

import click

from nvrx_slurm.cli.options import JobChoice, JobCommand, job_options, make_base
from nvrx_slurm.cli.output import note
from nvrx_slurm.errors import EXIT_INTERRUPTED, EXIT_RETRY, EXIT_TERMINATED, NvrxError
from nvrx_slurm.jobspec import env
from nvrx_slurm.util.terminal import drop_output

if TYPE_CHECKING:
    from nvrx_slurm.journal.folder import JobFolder

# How long `run` waits for a clean end of its job, before it kills it.
ENDING_S = 60.0

# What each of them makes of a job that has not begun to run.
ENDS: dict[signal.Signals, tuple[int, str]] = {
    signal.SIGINT: (EXIT_INTERRUPTED, "interrupted"),
    signal.SIGTERM: (EXIT_TERMINATED, "cancelled"),
    signal.SIGHUP: (EXIT_TERMINATED, "its terminal was closed"),
}


@click.command(cls=JobCommand)
@job_options
@click.option("--here", is_flag=True, help="Run on this machine, also inside an allocation of Slurm.")
@click.option("--quiet", is_flag=True, help="Do not show what the workers print.")
def run(choice: JobChoice, here: bool, quiet: bool) -> int:
    """Run JOB_YAML, or the command after --, in the foreground.

    Inside an allocation (salloc, or your own sbatch script) the job runs on its nodes; without --nodes, all that are
    not spares run workers. Elsewhere it runs on this machine, without Slurm: each node is a process of its own.

    Shows the journal's events and what the workers print. Ends with the job's exit code. Ctrl-C ends the job cleanly,
    a second one kills its workers, a third one everything; the death of this command ends the job too.
    """
    with ForwardedSignals() as signals:  # from before anything is loaded: no exception cuts an import short
        from nvrx_slurm.api.submission import check_attribution, check_store
        from nvrx_slurm.cluster.local import LocalCluster
        from nvrx_slurm.jobspec.script import render_job
        from nvrx_slurm.journal.folder import JobFolder
        from nvrx_slurm.report.ending import print_end
        from nvrx_slurm.report.live import watch

        loaded = choice.load()
        make_base(choice.folder)
        allocation = None
        if not here and env.own_job_id() is not None:
            from nvrx_slurm.cluster.allocation import current_allocation, start_run

            allocation = current_allocation()
        plan = choice.plan(loaded)
        check_attribution(plan)
        if plan.store.url is not None:
            # Before a job is started: its batch host would wait for the store for minutes, and only its log says so.
            check_store(plan.store)
        if signals.first is not None:
            exit_code, why = ENDS[signals.first]
            click.echo(f"nvrx-slurm: {why} before the job was started", err=True)
            return exit_code
        base = choice.folder
        if allocation is None:
            script = render_job(loaded.spec, plan, cluster="local", python=sys.executable)
            job_id, host = LocalCluster(base).start(script, folder=base, name=plan.name, detach=False)
        else:
            all_nodes = not any(layer.has(("nodes",)) or layer.has(("roles",)) for layer in loaded.layers)
            started = start_run(allocation, loaded.spec, folder=base, job_file=choice.file, all_nodes=all_nodes)
            job_id, host = started.job_id, started.process
            click.echo(f"job {job_id}: {started.placement()}", err=True)
        folder = JobFolder(base / job_id)
        with contextlib.suppress(OSError, NvrxError):  # a page can do without
            folder.write_origins(loaded.origins())
        signals.forward_to(host, folder)
        try:
            watch(base, job_id, output=not quiet)
        except OSError as error:
            # The reader of the pipe has what it wanted (`| head`), or the terminal is closed, and SIGHUP says so; or
            # the output goes to a disk that is full.
            drop_output()
            why = "nothing reads the output any more"
            if not isinstance(error, BrokenPipeError):
                why = f"the job cannot be shown any more: {error.strerror}"
            if signals.first is None:
                with contextlib.suppress(OSError):
                    note(f"nvrx-slurm: {why}; job {job_id} goes on, Ctrl-C ends it")
            host.wait()
        # The watch ends with the job. Its batch host still has to clear away.
        try:
            exit_code = host.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            signals.kill()
            exit_code = host.wait()
        exit_code = _settled(folder, exit_code, signals.first)
        with contextlib.suppress(OSError):  # the terminal is closed
            print_end(folder, exit_code)
        return exit_code


def _settled(folder: JobFolder, exit_code: int, ended_by: signal.Signals | None) -> int:
    """The job's exit code. A batch host that was killed leaves no result: then this command writes it."""
    from nvrx_slurm.journal.folder import Result
    from nvrx_slurm.util.clock import SystemClock
    from nvrx_slurm.util.signals import signal_name

    if exit_code >= 0:
        return exit_code
    if (result := folder.read_result()) is not None:
        return result.exit_code
    exit_code, reason = EXIT_RETRY, f"its batch host was killed by {signal_name(-exit_code)}"
    if ended_by is not None:
        exit_code, reason = ENDS[ended_by]
    folder.write_result(Result(exit_code=exit_code, reason=reason, ended_at=SystemClock().wall()))
    folder.remove_store()
    return exit_code


class ForwardedSignals:
    """Passes SIGINT, SIGTERM and SIGHUP on to the job's batch host, which ends the job; the second one hurries it,
    the third one kills every process of the job.

    Handlers act between two instructions of this command and raise nothing, so no import and no write is cut short.
    What arrives before there is a batch host is kept.
    """

    first: signal.Signals | None = None

    def __enter__(self) -> Self:
        from nvrx_slurm.agent import supervisor

        self._supervisor = supervisor  # a handler that imports may meet an import that it has interrupted
        self._host: subprocess.Popen[bytes] | None = None
        self._folder: JobFolder | None = None
        self._count = 0
        # One that is ignored (`nohup`, a background job of a script) stays so.
        heeded = [number for number in ENDS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._take) for number in heeded}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def forward_to(self, host: subprocess.Popen[bytes], folder: JobFolder) -> None:
        """There is a batch host from now on, in a session of its own: no signal of the terminal reaches it."""
        self._host, self._folder = host, folder
        if self.first is not None:
            self._pass_on(self.first)

    def kill(self) -> None:
        """End every process of the job now."""
        assert self._host is not None
        if self._host.poll() is None:
            below = self._supervisor.descendants(self._host.pid)
            self._supervisor.send_all([self._host.pid, *below], signal.SIGKILL)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or signal.Signals(number)
        self._count += 1
        if self._host is not None:
            self._pass_on(signal.Signals(number))

    def _pass_on(self, number: signal.Signals) -> None:
        assert self._host is not None and self._folder is not None
        has_begun = True
        with contextlib.suppress(NvrxError, OSError):
            info = self._folder.read_info()
            has_begun = info is not None and bool(info.addr)
        if self._count > 2 or not has_begun:
            # The batch host names its address once signals end it in good order. Before, lines of `setup` may run,
            # and nothing of the job itself does.
            self.kill()
        else:
            # The batch host hurries when the signal that ended it comes again: a second one, of any kind, is sent as
            # the first.
            self._host.send_signal(number if self._count == 1 else self.first or number)
