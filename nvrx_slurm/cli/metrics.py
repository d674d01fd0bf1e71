"""`nvrx-slurm metrics`: jobs as OpenMetrics, printed, in a file for node_exporter, or served to Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.job_argument import found_jobs, jobs_argument, with_find_job
from nvrx_slurm.cli.options import folder_option
from nvrx_slurm.cli.output import note
from nvrx_slurm.errors import EXIT_INTERRUPTED, UsageError

if TYPE_CHECKING:
    from nvrx_slurm.journal.folder import JobFolder

# What Prometheus knows as the port of OpenTelemetry's exporter; no other command listens there by default.
PORT = 9464


@click.command()
@jobs_argument
@click.option(
    "--listen", metavar="HOST:PORT", help=f"Serve /metrics there until Ctrl-C; :{PORT} is 127.0.0.1:{PORT}."
)
@click.option(
    "--textfile",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a file for node_exporter's textfile collector; its name ends in .prom.",
)
@click.option(
    "--show",
    type=click.Choice(["rules", "dashboard"]),
    help="Print the alert rules for Prometheus, or the dashboard for Grafana, and read no job.",
)
@folder_option
def metrics(
    job_ids: tuple[str, ...], listen: str | None, textfile: Path | None, show: str | None, folder: Path
) -> None:
    """Jobs as metrics: goodput, recoveries by phase, nodes by state, steps, ages of heartbeats.

    Prints OpenMetrics text. With --listen Prometheus can scrape it: each scrape reads what is new. No metric has a
    rank, a node, a path or an argument as a label. All metrics, a dashboard and alert rules: docs/observability.md.
    """
    if show is not None:
        from importlib import resources

        name = {"rules": "rules.yaml", "dashboard": "dashboard.json"}[show]
        text = (resources.files("nvrx_slurm.report.prometheus") / name).read_text(encoding="utf-8")
        click.echo(text, nl=False)
        return
    if listen is not None and textfile is not None:
        raise UsageError("--listen serves metrics and --textfile writes them once: choose one")
    jobs = found_jobs(job_ids or [None], folder)
    if listen is not None:
        serve(jobs, *address_of(listen))
        return
    import gc

    from prometheus_client import exposition
    from prometheus_client.openmetrics import exposition as openmetrics

    from nvrx_slurm.report.live_jobs import FollowedJobs
    from nvrx_slurm.report.metrics import registry_of

    gc.disable()  # as `report` does; a server that stays collects
    if textfile is not None and textfile.suffix != ".prom":
        raise UsageError(f"--textfile {textfile}: node_exporter reads files whose names end in .prom only")
    with FollowedJobs(jobs) as followed:
        readings = followed.look()
    # Read before anything is written: an error of a job is no error of the file.
    registry = registry_of(lambda: readings)
    if textfile is None:
        click.echo(openmetrics.generate_latest(registry), nl=False)  # type: ignore[no-untyped-call]
        return
    try:
        exposition.write_to_textfile(str(textfile), registry)
    except OSError as error:
        raise UsageError(f"--textfile {textfile}: cannot be written: {error.strerror}") from None


metrics.help = with_find_job(metrics.help)


def address_of(text: str) -> tuple[str, int]:
    """Host and port of --listen. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"--listen {text}: is HOST:PORT, such as 127.0.0.1:{PORT}")
    return host.strip("[]") or "127.0.0.1", int(port)


def serve(jobs: list[JobFolder], host: str, port: int) -> None:
    """Answer scrapes until SIGINT or SIGTERM. Raises UsageError where the address cannot be had."""
    from prometheus_client import start_http_server

    from nvrx_slurm.cli.recorded_signals import RecordedSignals
    from nvrx_slurm.report.live_jobs import FollowedJobs
    from nvrx_slurm.report.metrics import registry_of

    with RecordedSignals() as interruption, FollowedJobs(jobs) as followed:
        try:
            server, thread = start_http_server(port, addr=host, registry=registry_of(followed.look))
        except OSError as error:
            raise UsageError(f"--listen {host}:{port}: cannot listen there: {error.strerror}") from None
        note(f"nvrx-slurm: metrics at http://{host}:{server.server_port}/metrics")
        try:
            interruption.wait(None)
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
    if interruption.exit_code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
