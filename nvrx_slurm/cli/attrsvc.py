"""`nvrx-slurm attrsvc`"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from nvrx_slurm.cli.options import duration_option
from nvrx_slurm.errors import MissingProgramError, UsageError

_PATH = click.Path(path_type=Path)
_MEBIBYTE = 1 << 20


@click.command()
@click.option(
    "--bind", default="127.0.0.1:8443", show_default=True, metavar="HOST:PORT", help="Port 0: any free one."
)
@click.option("--root", "roots", type=_PATH, multiple=True, required=True, help="Read below this folder; repeatable.")
@click.option(
    "--token-file",
    type=_PATH,
    help="File with the bearer token, mode 0600; or set NVRX_SLURM_ATTRSVC_TOKEN. Without: created, on loopback.",
)
@click.option("--no-token", is_flag=True, help="On loopback: let every user of this machine ask.")
@click.option("--tls-cert", type=_PATH, help="Serve HTTPS with this certificate (PEM, with its chain).")
@click.option("--tls-key", type=_PATH, help="The certificate's private key (PEM).")
@click.option("--state-dir", type=_PATH, help="Keep results here across restarts. Default: in memory only.")
@click.option("--workers", type=click.IntRange(1, 64), help="Processes that analyse. Default: the CPUs, 4 at most.")
@click.option("--worker-memory", type=click.IntRange(128), default=2048, show_default=True, help="MiB for each.")
@click.option("--rules", type=_PATH, multiple=True, help="A file of your own rules; repeatable.")
@duration_option("--timeout", "Bound of one analysis.", "60s")
@duration_option("--drain", "Bound of finishing, at SIGTERM.", "30s")
@duration_option("--longest-wait", "Bound of a long poll.", "60s")
@click.option("--rate", type=click.FloatRange(0.1), default=100.0, show_default=True, help="Requests/s per client.")
@click.option("--max-queued", type=click.IntRange(1), default=256, show_default=True, help="Analyses that wait.")
@click.option("--keep", type=click.IntRange(1), default=10_000, show_default=True, help="Results that are kept.")
@duration_option("--keep-for", "How long they are kept.", "7d")
@click.option("--port-file", type=_PATH, help="Write the port here as soon as it listens.")
@click.option("--managed", is_flag=True, help="Die with the process that started this.")
def attrsvc(**options: Any) -> int:
    """Serve failure attribution over HTTP, for a fleet of jobs; docs/attrsvc.md has the API.

    SIGTERM finishes what runs and ends; a second Ctrl-C ends at once.
    """
    try:
        import prometheus_client  # noqa: F401 -- asked for by name below
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingProgramError(
            f"attrsvc needs the package {error.name}: pip install 'nvrx-slurm[attribution]'"
        ) from None
    from nvrx_slurm.attribution.service.server import run
    from nvrx_slurm.attribution.service.settings import ServiceSettings, parse_bind, read_token
    from nvrx_slurm.attribution.service.storage import RetentionLimits
    from nvrx_slurm.util.log import set_up

    set_up("attrsvc")
    if (options["tls_cert"] is None) != (options["tls_key"] is None):
        raise UsageError("--tls-cert and --tls-key go together: name both")
    address = parse_bind(options["bind"])
    token = read_token(options["token_file"], address, without=options["no_token"])
    bounds = RetentionLimits(queued=options["max_queued"], kept=options["keep"], kept_for_s=options["keep_for"])
    settings = ServiceSettings(
        bind=address,
        roots=options["roots"],
        token=token,
        makes_token=token is None and not options["no_token"],
        state_dir=options["state_dir"],
        workers=options["workers"] or min(4, os.cpu_count() or 1),
        rules=options["rules"],
        port_file=options["port_file"],
        tls_cert=options["tls_cert"],
        tls_key=options["tls_key"],
        timeout_s=options["timeout"],
        drain_s=options["drain"],
        longest_wait_s=options["longest_wait"],
        requests_per_s=options["rate"],
        worker_memory_bytes=options["worker_memory"] * _MEBIBYTE,
        bounds=bounds,
        managed=options["managed"],
    )
    return run(settings, click.echo)
