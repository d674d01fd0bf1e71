"""`nvrx-slurm ci record`, `replay`, `matrix`: flows made of jobs that ran, and of jobs that are to run."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvrx_slurm.cli.ci import run_and_report, suite_options
from nvrx_slurm.cli.completion import complete_jobs
from nvrx_slurm.cli.job_argument import chosen_job
from nvrx_slurm.cli.options import JobChoice, JobCommand, duration_option, folder_option, job_options
from nvrx_slurm.cli.output import note
from nvrx_slurm.errors import EXIT_DONE, EXIT_FAILED, UsageError
from nvrx_slurm.util.sanitize import one_line
from nvrx_slurm.util.terminal import write_exactly

if TYPE_CHECKING:
    from nvrx_slurm.jobspec.plan import Plan
    from nvrx_slurm.lab.flow.matrix import LeftOut, MatrixCase
    from nvrx_slurm.lab.flow.model import StageName

_JOB = click.argument("job", metavar="[JOB]", required=False, shell_complete=complete_jobs)
_OF_WHAT = "JOB: a job's id, its folder, or its events.jsonl, with the older parts beside it. Without it: the newest."
_PLAN = click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    help="The job's plan.json. Default: the one beside the journal.",
)


@click.command(epilog=_OF_WHAT)
@_JOB
@_PLAN
@folder_option
def replay(job: str | None, plan_file: Path | None, folder: Path) -> None:
    """Replay a job's journal through the decision core; print the first different decision, if any (exit code 1)."""
    from nvrx_slurm.lab.flow import replaying
    from nvrx_slurm.lab.flow.replaying import read_journal, read_plan

    path = _journal_of(job, folder)
    text = read_journal(path)
    for each in text.notes:
        note(f"note: {each}")
    done = replaying.replay(read_plan(plan_file or path.parent / "plan.json"), text.entries)
    if done.parting is not None:
        click.echo("\n".join(map(one_line, replaying.explain(done.parting, text.entries))))
        sys.exit(EXIT_FAILED)
    if done.unwritten:
        note(f"note: {done.unwritten} decisions were made and never written down")
    click.echo(f"{done.entries} entries, {done.decisions} decisions among them: the core decides the same today")


@click.command(epilog=_OF_WHAT)
@_JOB
@_PLAN
@click.option("--job", "job_file", type=click.Path(path_type=Path), help="The job.yaml that the flow names.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The flow's file. Default: stdout.")
@folder_option
def record(job: str | None, plan_file: Path | None, job_file: Path | None, output: Path | None, folder: Path) -> None:
    """Print a flow that asks for what this job did, its faults included: what was done to it is inferred.

    Without --job the flow's job is written beside it, as NAME.job.yaml, made from the job's plan: what stood below
    `slurm` and `setup` is not in it.
    """
    from nvrx_slurm.lab.flow.recording import record as recorded
    from nvrx_slurm.lab.flow.replaying import read_journal, read_plan
    from nvrx_slurm.lab.flow.writing import to_yaml

    if output is not None and output.is_dir():
        raise UsageError(f"-o {output}: is a folder; name a file in it")
    path = _journal_of(job, folder)
    text, plan = read_journal(path), read_plan(plan_file or path.parent / "plan.json")
    # The flow names its job relative to its own file, wherever that is written.
    place = output or _file_of_stdout() or Path(f"{plan.name}.yaml")
    named = job_file or place.with_suffix(".job.yaml")
    about = f"What job {path.parent.name} ({plan.name}) did."
    changed = _overrides(plan, job_file) if job_file else {}
    flow = recorded(plan, text.entries, job=_seen_from(place.parent, named), about=about, overrides=changed)
    if not flow["expect"]:
        raise UsageError(
            f"{path}: nothing came of this job that a flow could ask for: its first rendezvous never closed"
        )
    if job_file is None:
        from nvrx_slurm.lab.flow.writing import job_yaml

        made = f"Made from the plan of job {path.parent.name}."
        job_text = job_yaml(plan, f"{made} A plan does not hold the keys below `slurm` and `setup`.")
        _refuse_other(named, job_text, "name the job's file with --job, or the flow's with -o")
        _write(named, job_text)
        click.echo(f"wrote {named}", err=True)
    if output is None:
        write_exactly(to_yaml(flow))
    else:
        _write(output, to_yaml(flow))


@click.command(cls=JobCommand)
@job_options
@click.option("--flow", "only", multiple=True, metavar="GLOB", help="Only faults with such a name; repeatable.")
@click.option("--list", "only_list", is_flag=True, help="List the flows that would run, and why others are left out.")
@click.option("--write", "into", type=click.Path(path_type=Path), help="Write the flows into this folder; run none.")
@duration_option("--starts-within", "Until all workers run.", "2m")
@suite_options
def matrix(
    choice: JobChoice,
    only: tuple[str, ...],
    only_list: bool,
    into: Path | None,
    starts_within: float,
    stage: StageName | None,
    **options: Any,
) -> int:
    """Inject every fault that the job of JOB_YAML should survive, one per flow, and check that it recovers.

    Each fault happens when all workers run; once the job has recovered, it is cancelled. It need not run to its end.
    """
    import tempfile

    from nvrx_slurm.lab.flow.load import load_flows
    from nvrx_slurm.lab.flow.stages import choose_stage

    stage = stage or choose_stage()

    cases, left_out = _chosen(choice.plan(choice.load()), stage, only)
    if only_list:
        width = max(len(name) for name in [each.name for each in cases] + [each.name for each in left_out])
        for case in cases:
            click.echo(f"{case.name:<{width}}  {case.about}")
        for each in left_out:
            click.echo(f"{each.name:<{width}}  left out: {each.why}")
        return EXIT_DONE
    if into is not None:
        _write_flows(cases, choice, into, starts_within)
        click.echo(f"wrote {len(cases)} flows into {into}", err=True)
        return EXIT_DONE
    with tempfile.TemporaryDirectory(prefix="nvrx-matrix-") as folder:
        _write_flows(cases, choice, Path(folder), starts_within)
        return run_and_report(load_flows([Path(folder)]), stage=stage, **options)


def _chosen(plan: Plan, stage: StageName, only: tuple[str, ...]) -> tuple[list[MatrixCase], list[LeftOut]]:
    """What there is to run, and what is left out. Raises UsageError, which lists the names."""
    from fnmatch import fnmatchcase

    from nvrx_slurm.lab.flow.matrix import MatrixCase, matrix

    found = matrix(plan, stage)
    wanted = [each for each in found if not only or any(fnmatchcase(each.name, glob) for glob in only)]
    cases = [each for each in wanted if isinstance(each, MatrixCase)]
    left_out = [each for each in wanted if not isinstance(each, MatrixCase)]
    if not cases:
        why = "".join(f"; {each.name}: {each.why}" for each in left_out)
        there = ", ".join(each.name for each in found if isinstance(each, MatrixCase))
        raise UsageError(f"--flow {' '.join(only)}: nothing to run on the stage {stage}{why}. There is: {there}")
    return cases, left_out


def _write_flows(cases: list[MatrixCase], choice: JobChoice, folder: Path, start_s: float) -> None:
    from nvrx_slurm.lab.flow.writing import to_yaml

    if choice.file is None:
        raise UsageError("the flows name a file of the job: write one with --save job.yaml")
    folder.mkdir(parents=True, exist_ok=True)
    job, changed = _seen_from(folder, choice.file), _overrides(choice.plan(choice.load()), choice.file)
    files = {folder / f"{case.name}.yaml": to_yaml(case.document(job, changed, start_s)) for case in cases}
    for path, text in files.items():
        _refuse_other(path, text, "name another folder")
    for path, text in files.items():
        _write(path, text)


# ------------------------------------------------------------------------------------------------ places


def _journal_of(job: str | None, folder: Path) -> Path:
    """The journal's file. Raises UsageError, which lists the jobs of the base folder."""
    path = None if job is None else Path(job)
    if path is not None and path.is_file():
        return path
    if path is not None and len(path.parts) > 1 and not path.exists():
        raise UsageError(f"{path}: there is no such file or folder; name a job, its folder, or its events.jsonl")
    # No file, and no folder here: then it is a job's id.
    if path is None or not path.is_dir():
        from nvrx_slurm.report.jobs import find_job

        job_id, folder = chosen_job(job, folder)
        path = find_job(folder, job_id).path
    return path / "events.jsonl"


def _file_of_stdout() -> Path | None:
    """The file that stdout is redirected to, if it is one."""
    try:
        if stat.S_ISREG(os.fstat(1).st_mode):
            return Path("/proc/self/fd/1").readlink()
    except OSError:  # closed, or no /proc
        pass
    return None


def _seen_from(place: Path, file: Path) -> str:
    return os.path.relpath(file.resolve(), place.resolve())


def _overrides(plan: Plan, job_file: Path) -> dict[str, Any]:
    """What the job had differently from what job.yaml says now; where it worked aside."""
    from nvrx_slurm.jobspec.load import load
    from nvrx_slurm.jobspec.plan import plan as plan_of
    from nvrx_slurm.lab.flow.writing import overrides

    changed = overrides(plan, plan_of(load(job_file).spec, folder=Path(plan.folder), job_file=job_file))
    return {key: value for key, value in changed.items() if key not in ("name", "workdir")}


def _refuse_other(path: Path, text: str, remedy: str) -> None:
    """Raises UsageError where the path has a file that says something else."""
    try:
        is_other = path.read_text() != text
    except FileNotFoundError:
        return
    except (OSError, UnicodeError):
        is_other = True
    if is_other:
        raise UsageError(f"{path} is there already, and is another one: remove it, or {remedy}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
