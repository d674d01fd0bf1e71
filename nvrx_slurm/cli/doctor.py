"""`nvrx-slurm doctor`: what this site's settings mean for a job."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.options import DEFAULT_FILE, JobChoice, duration_option, folder_option, make_base
from nvrx_slurm.cli.output import note, print_json
from nvrx_slurm.errors import EXIT_DONE, EXIT_FAILED, MissingProgramError, SlurmUnreachable
from nvrx_slurm.util.ownership import login_name
from nvrx_slurm.util.sanitize import one_line

if TYPE_CHECKING:
    from nvrx_slurm.cluster.accounting_limits import Accounting
    from nvrx_slurm.cluster.commands import SlurmPrograms

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@click.argument("job_yaml", required=False, type=click.Path(path_type=Path))
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Any key: --set slurm.partition=gpu")
@click.option("--probe", is_flag=True, help="Also submit a short job, which tries the nodes and the network.")
@click.option(
    "--nodes",
    type=click.IntRange(1),
    help="Nodes that the probe takes. Default: 2, or 1 if the job or partition has one.",
)
@duration_option("--timeout", "Bound of the probe, its wait too.", "5m")
@click.option("--json", "as_json", is_flag=True, help="One object, with each check.")
@folder_option
def doctor(
    job_yaml: Path | None,
    assignments: tuple[str, ...],
    probe: bool,
    nodes: int | None,
    timeout: float,
    as_json: bool,
    folder: Path,
) -> int:
    """Say what this site's settings of Slurm mean for the job of JOB_YAML, and what to change.

    Without JOB_YAML: job.yaml, if it is here, else a job of one node with all defaults. Exits with 1 if a line says
    `fail`, else with 0.
    """
    from nvrx_slurm.cluster import accounting_limits as limits
    from nvrx_slurm.cluster.commands import PATIENCE_S, SlurmPrograms, SystemRunner
    from nvrx_slurm.cluster.site_checks import Site, check_site, partitions_of
    from nvrx_slurm.cluster.slurm_text import number_of, settings_of
    from nvrx_slurm.jobspec.load import parse_assignment

    file = job_yaml or (DEFAULT_FILE if DEFAULT_FILE.exists() else None)
    command = () if file else ("true",)
    choice = JobChoice(file, folder, flags=tuple(map(parse_assignment, assignments)), command=command)
    loaded = choice.load()
    spec, plan = loaded.spec, choice.plan(loaded)

    programs = SlurmPrograms(SystemRunner(), PATIENCE_S)
    config = programs.ask("scontrol", "show", "config")
    if not config.ok:
        raise SlurmUnreachable(f"scontrol does not show the configuration: {config.reason}")
    partitions = partitions_of(programs.ask("scontrol", "--oneliner", "show", "partition").stdout)
    wanted = spec.slurm.partition.split(",")[0] if spec.slurm.partition else None
    default = next((each for each in partitions.values() if each.get("Default") == "YES"), {})
    chosen = partitions.get(wanted, {}) if wanted else default
    settings = settings_of(config.stdout)
    accounting = _accounting(programs, settings) if limits.is_enforced(settings) else None
    if accounting is not None:
        chosen = {**chosen, **limits.preemption_of(accounting, spec, settings, chosen)}
    checks = check_site(Site(spec=spec, plan=plan, config=settings, partition=chosen))
    checks += limits.check_limits(accounting, spec, plan, settings, chosen)
    if probe:
        from nvrx_slurm.cluster.probe_job import check_nodes, probe_script, run_probe

        # Two, to see the network between them, unless the user's own job or the partition has one node only.
        allowed = (number_of(chosen, setting) for setting in ("MaxNodes", "TotalNodes"))
        nodes = nodes or int(min(2, plan.total_nodes if file else 2, *(most for most in allowed if most)))
        make_base(folder)
        script = probe_script(spec, nodes=nodes, folder=folder, python=sys.executable)
        facts, problem = run_probe(script, nodes=nodes, folder=folder, timeout_s=timeout, say=note)
        checks += check_nodes(facts, plan, spec, nodes=nodes, problem=problem)
    is_fit = all(check.level != "fail" for check in checks)
    if as_json:
        print_json({"job": plan.name, "fit": is_fit, "checks": checks})
        return EXIT_DONE if is_fit else EXIT_FAILED
    width = max(len(check.part) for check in checks)
    for check in checks:
        level = click.style(f"{check.level:<4}", fg=_COLOURS[check.level])
        click.echo(f"{level}  {check.part:<{width}}  {one_line(check.seen)}")
        if check.effect:
            click.echo(f"{'':{width + 6}}  → {one_line(check.effect)}")
        if check.todo:
            click.echo(f"{'':{width + 6}}  {check.by}: {one_line(check.todo)}")
    return EXIT_DONE if is_fit else EXIT_FAILED


def _accounting(programs: SlurmPrograms, config: Mapping[str, str]) -> Accounting | None:
    """What sacctmgr shows of this user; None where it does not answer, or the user has no name to ask it about."""
    from nvrx_slurm.cluster import accounting_limits as limits

    show = ("sacctmgr", "--parsable2", "--readonly", "show")
    user = login_name(os.getuid())
    if user is None:  # accounting knows users by their names
        note(f"uid {os.getuid()} has no user name here: sacctmgr cannot be asked about it")
        return None
    try:
        answers = [
            programs.run(*show, "qos", limits.QOS_FORMAT),
            programs.run(
                *show, "assoc", f"user={user}", f"cluster={config.get('ClusterName', '')}", limits.ASSOC_FORMAT
            ),
            programs.run(*show, "user", user, limits.USER_FORMAT),
        ]
    except (MissingProgramError, SlurmUnreachable):
        return None
    if not all(answer.ok for answer in answers):
        return None
    qos, associations, users = (limits.rows_of(answer.stdout) for answer in answers)
    return limits.Accounting(
        qos={row["Name"]: row for row in qos},
        associations=tuple(associations),
        account=next((row.get("Def Acct", "") for row in users), ""),
    )
