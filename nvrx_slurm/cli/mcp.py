"""`nvrx-slurm mcp`: the tools of attribution for an assistant."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from nvrx_slurm.cli.options import folder_option

MOST_FAILURES = 3


@click.command()
@click.option(
    "--root",
    "roots",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Read logs below this folder only; repeatable. Without it: all that you may read.",
)
@click.option(
    "--rules",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A file of your own rules, beside the shipped ones; repeatable.",
)
@folder_option
def mcp(roots: tuple[Path, ...], rules: tuple[Path, ...], folder: Path) -> None:
    """Serve the tools of attribution to an assistant, over standard input and output (MCP).

    Tools: attribute, analyze_paths, explain_job, list_rules, explain_rule.
    """
    from nvrx_slurm.attribution.http_client import need

    need("mcp")
    from nvrx_slurm.attribution.mcp_server import serve

    serve(rules=rules, roots=roots, explain=partial(_explain, folder))


def _explain(base: Path, job_id: str) -> dict[str, Any]:
    """How the job stands, as `status --json` has it, and its last failures, as `explain --json` has them."""
    import msgspec

    from nvrx_slurm.report import snapshot
    from nvrx_slurm.report.explanation import explanation
    from nvrx_slurm.report.failures import Failures
    from nvrx_slurm.report.jobs import find_job, read_plan

    job = find_job(base, job_id)
    plan = read_plan(job)
    if plan is None:
        return {"status": msgspec.json.decode(snapshot.as_json(snapshot.take(job))), "failures": []}
    history = Failures(plan, job)
    status = msgspec.json.decode(snapshot.as_json(snapshot.take(job, history)))
    newest = history.timelines[: -MOST_FAILURES - 1 : -1]
    found = [explanation(timeline, job=job_id, name=plan.name) for timeline in newest]
    return {"status": status, "failures": msgspec.json.decode(msgspec.json.encode(found))}
