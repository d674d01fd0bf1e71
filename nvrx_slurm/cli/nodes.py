"""`nvrx-slurm nodes`: nodes that evidence speaks against."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.output import print_json
from nvrx_slurm.errors import UsageError
from nvrx_slurm.util.sanitize import one_line

if TYPE_CHECKING:
    from nvrx_slurm.attribution.blames import Suspect
    from nvrx_slurm.attribution.ledger import Ledger

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


def _open(where: str | None, cluster: str | None) -> Ledger:
    """The ledger that the user named, or else the configured one."""
    from nvrx_slurm.api.suspicion import configured_ledger, ledger_for

    return ledger_for(where or configured_ledger(), cluster)


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="One object, with all evidence against each node.")
@click.option("--ledger", "where", metavar="FILE|URL", help="Another ledger than the configured one.")
@click.option("--cluster", metavar="NAME", help="Another cluster than that of SLURM_CONF.")
@click.pass_context
def nodes(context: click.Context, as_json: bool, where: str | None, cluster: str | None) -> None:
    """List suspect nodes: the evidence against each, its age, and the jobs.

    Evidence loses half of its weight each day. Jobs give suspect nodes no ranks while they have others, and
    `nvrx-slurm submit --exclude-suspects` does not ask for them.
    """
    context.obj = partial(_open, where, cluster)  # opened when a command needs it, not for `--help`
    if context.invoked_subcommand is None:
        from nvrx_slurm.util.clock import SystemClock

        ledger = _open(where, cluster)
        found = ledger.suspects()
        if as_json:
            print_json({"cluster": ledger.cluster, "ledger": ledger.where, "suspects": found})
        elif not found:
            click.echo(f"no node of cluster {ledger.cluster} is suspect ({ledger.where})", err=True)
        else:
            click.echo(_table(found, SystemClock().wall()))


@nodes.command()
@click.argument("names", metavar="NODE…", nargs=-1, required=True)
@click.option("--why", required=True, help="What is wrong with it; `nvrx-slurm nodes` shows it.")
@click.pass_obj
def suspect(opened: Callable[[], Ledger], names: tuple[str, ...], why: str) -> None:
    """Mark nodes as suspect for about three days."""
    from nvrx_slurm.attribution.blames import Blame, BlameKind
    from nvrx_slurm.util.clock import SystemClock

    for name in names:
        if not _NODE.fullmatch(name):
            raise UsageError(f"{name!r} is no node's name: name them one by one, such as n1 n2")
    # Bytes of another encoding than UTF-8 are lone surrogates here, which no ledger can hold.
    text = os.fsencode(" ".join(why.split())).decode(errors="backslashreplace")
    ledger, now = opened(), SystemClock().wall()
    ledger.blame(
        Blame(cluster=ledger.cluster, node=name, kind=BlameKind.SAID, failure="said", at=now, evidence=text)
        for name in names
    )
    click.echo(f"{', '.join(names)}: suspect in cluster {ledger.cluster}")


@nodes.command()
@click.argument("name", metavar="[NODE]", required=False)
@click.option("--all", "everything", is_flag=True, help="Every node of the cluster.")
@click.pass_obj
def clear(opened: Callable[[], Ledger], name: str | None, everything: bool) -> None:
    """Remove the evidence against a node, or against all."""
    if (name is None) != everything:
        raise UsageError("name one node, or say --all")
    cleared = opened().clear(name)
    click.echo(one_line(f"{', '.join(cleared)}: cleared") if cleared else "nothing spoke against it", err=not cleared)


def _table(found: Sequence[Suspect], now: float) -> str:
    from nvrx_slurm.api.suspicion import worst_of
    from nvrx_slurm.report.plain import table
    from nvrx_slurm.report.tables import Row, Table
    from nvrx_slurm.report.words import seconds

    rows = []
    for suspect in found:
        why = worst_of(suspect)
        more = f" (+{len(suspect.blames) - 1})" if len(suspect.blames) > 1 else ""
        last = f"{seconds(now - max(blame.at for blame in suspect.blames))} ago"
        clear_in, jobs = seconds(suspect.until - now), ",".join(suspect.jobs) or "-"
        rows.append(Row((suspect.node, f"{suspect.score:.2f}", clear_in, last, jobs, why + more)))
    columns = ("NODE", "SCORE", "CLEAR IN", "LAST", "JOBS", "WHY")
    return table(Table(columns, tuple(rows), frozenset({"SCORE"})))
