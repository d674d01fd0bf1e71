"""`nvrx-slurm transport`: what this node can do for payloads, and what dead processes have left."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.output import print_json, print_table
from nvrx_slurm.errors import EXIT_DONE, EXIT_FAILED
from nvrx_slurm.util.sanitize import one_line

if TYPE_CHECKING:
    from nvrx_slurm.report.tables import Mood

_MOODS: dict[str, Mood] = {"ok": "good", "warn": "busy", "fail": "bad", "absent": "dim"}


@click.group()
def transport() -> None:
    """Payloads between the processes of a job, on one node and across nodes (docs/transport.md)."""


@transport.command()
@click.option("--json", "as_json", is_flag=True, help="One object, with a finding for each part.")
def doctor(as_json: bool) -> int:
    """Try what payloads need on this node, and say what to do about what is wrong.

    Exits with 0 if shm and tcp work, which are used by default, else with 1. On a job's nodes: srun nvrx-slurm
    transport doctor.
    """
    from nvrx_slurm.transport.doctor import examine, is_fit

    findings = examine()
    if as_json:
        from nvrx_slurm.transport.environment import node_name

        print_json({"node": node_name(), "fit": is_fit(findings), "findings": [each._asdict() for each in findings]})
        return EXIT_DONE if is_fit(findings) else EXIT_FAILED
    from nvrx_slurm.report.tables import Row, Table

    rows = [
        Row((each.part, each.level.value, each.seen, each.todo or "-"), _MOODS[each.level.value]) for each in findings
    ]
    print_table(Table(("PART", "LEVEL", "SEEN", "WHAT TO DO"), tuple(rows)))
    return EXIT_DONE if is_fit(findings) else EXIT_FAILED


@transport.command()
@click.option("--folder", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Instead of /dev/shm.")
def sweep(folder: Path | None) -> None:
    """Remove the rings whose producer is dead, and print their names.

    A new ring and the job's agents do so too. Rings of other users, and of containers with process ids of their own,
    are left alone.
    """
    from nvrx_slurm.transport.ring import sweep
    from nvrx_slurm.transport.ring_file import SHM

    names = sweep(folder or SHM)
    for name in names:
        click.echo(one_line(name))
    if not names:
        click.echo("no ring of a dead process", err=True)
