"""`nvrx-slurm demo`: see a job survive the loss of a node, on this machine."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import click

from nvrx_slurm.cli.recorded_signals import exit_on_sigterm


@click.command()
@click.option(
    "--keep", type=click.Path(path_type=Path), metavar="FOLDER", help="Keep logs, journals and checkpoints."
)
def demo(keep: Path | None) -> int:
    """Train on 4 local nodes with 2 hot spares, kill one node midway, and compare the result.

    It needs no Slurm and takes about 15 seconds. It ends with a page that shows the job, and keeps nothing else
    without --keep.
    """
    import tempfile

    from nvrx_slurm.lab.demo import demo

    exit_on_sigterm()  # the job is cancelled on the way out
    with ExitStack() as stack:
        base = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nvrx-demo-")))
        report = base.resolve() / "report.html"
        if not keep:
            descriptor, path = tempfile.mkstemp(prefix="nvrx-demo-", suffix=".html")
            os.close(descriptor)
            report = Path(path)
            # A demo that does not get so far leaves no empty file.
            stack.callback(lambda: None if report.stat().st_size else report.unlink())
        exit_code = demo(base.resolve(), click.echo, report=report)
        if keep:
            click.echo(f"\nlogs, journals, checkpoints: {keep}; nvrx-slurm explain --folder {keep}")
    return exit_code
