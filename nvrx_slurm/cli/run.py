"""`nvrx-slurm run`"""

from __future__ import annotations

import signal
import subprocess
import sys

import click

from nvrx_slurm.cli.options import JobChoice, JobCommand, job_options, make_base

ENDING_S = 60.0


@click.command(cls=JobCommand)
@job_options
def run(choice: JobChoice) -> int:
    """Run JOB_YAML on this machine, in the foreground, without Slurm: each node is a process of its own.

    Ends with the job's exit code. Ctrl-C ends the job cleanly; so does the death of this command.
    """
    from nvrx_slurm.cluster.local import LocalCluster
    from nvrx_slurm.jobspec.script import render_job
    from nvrx_slurm.report.live import watch

    loaded = choice.load()
    plan = choice.plan(loaded)
    make_base(choice.folder)
    script = render_job(loaded.spec, plan, cluster="local", python=sys.executable)
    job_id, host = LocalCluster(choice.folder).start(script, folder=choice.folder, name=plan.name, detach=False)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: host.send_signal(signal.SIGTERM))
    try:
        watch(choice.folder, job_id)
    except KeyboardInterrupt:
        host.send_signal(signal.SIGINT)
    return _wait(host)


def _wait(host: subprocess.Popen[bytes]) -> int:
    """Wait for the end; a second Ctrl-C does not wait for a clean one."""
    try:
        return host.wait(ENDING_S)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        host.kill()
        return host.wait()
