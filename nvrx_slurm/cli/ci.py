"""`nvrx-slurm ci`: the group, and its commands `run`, `check`, `schema`, `clean` and `simulate`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvrx_slurm.cli import LazyGroup
from nvrx_slurm.cli.completion import complete_flows
from nvrx_slurm.cli.options import duration_option, with_options
from nvrx_slurm.cli.output import note
from nvrx_slurm.errors import EXIT_DONE, EXIT_FAILED, MalformedRecord, MissingProgramError, UsageError
from nvrx_slurm.util.sanitize import one_line

if TYPE_CHECKING:
    from nvrx_slurm.lab.flow.model import Flow, StageName
    from nvrx_slurm.lab.flow.outcome import SuiteOutcome

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("ci:run", "Run flows: jobs, real faults, and what their journals must say."),
    "check": ("ci:check", "Load flows and check them; run nothing."),
    "schema": ("ci:schema", "The JSON Schema of a flow file, for editors."),
    "clean": ("ci:clean", "End what a run that was killed has left behind."),
    "record": ("ci_tools:record", "Write a flow from a job that ran."),
    "replay": ("ci_tools:replay", "Feed a journal through the core again: the same decisions, or where they part."),
    "matrix": ("ci_tools:matrix", "Every fault that a job of yours should survive, as flows, and run them."),
    "simulate": ("ci:simulate", "Seeded runs with faults, simulated, with every promise checked."),
}


@click.group(cls=LazyGroup, commands_in=COMMANDS)
def ci() -> None:
    """Test that jobs recover: flows (a job, real faults, what its journal must contain), and simulations.

    \b
    nvrx-slurm ci run ci/flows
    nvrx-slurm ci run ci/flows --flow 'spare-*' --on local
    nvrx-slurm ci check ci/flows
    """


_FILE = click.Path(path_type=Path, dir_okay=False)
_FOLDER = click.Path(path_type=Path, file_okay=False)

_paths = click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
_only = click.option(
    "--flow",
    "only",
    multiple=True,
    metavar="GLOB",
    shell_complete=complete_flows,
    help="Only flows with such a name; repeatable.",
)
_STAGE = click.Choice(["slurm", "dev", "local"])

# Of a command that runs flows; it passes them on to `run_and_report`.
suite_options = with_options(
    click.option(
        "--on",
        "stage",
        type=_STAGE,
        help="The site's Slurm, one that is started here for each flow, or no Slurm."
        " Default: the first that there is.",
    ),
    click.option("--jobs", type=click.IntRange(1, 64), default=3, show_default=True, help="Flows at once."),
    click.option(
        "--retries", type=click.IntRange(0, 10), default=0, help="How often to run again what did not pass."
    ),
    duration_option("--timeout", "Bound of the whole run.", "20m"),
    click.option("--artifacts", type=click.Path(path_type=Path), help="Default: nvrx-ci/<time>."),
    click.option("--junit", type=_FILE, help="Write JUnit XML."),
    click.option("--html", type=_FILE, help="Write a page, and beside it one for each job, which it links."),
    click.option("--json", "as_json", type=_FILE, help="Write all results as JSON."),
    click.option("--github/--no-github", default=None, help="Annotations, summary, outputs. Default: on GitHub."),
)


@click.command()
@_paths
@_only
@suite_options
def run(paths: tuple[Path, ...], only: tuple[str, ...], **options: Any) -> int:
    """Run the flows of PATHS: files, or folders of them.

    \b
    Exit code: 0 all passed, 1 a flow failed, or a report could not be written, 2 a flow or the command
    line is wrong, or the stage runs none of the flows (then nothing was submitted), 69 Slurm does not
    answer, 124 --timeout has passed, 130/143 interrupted; everything was cancelled then.
    """
    from nvrx_slurm.lab.flow.load import load_flows

    return run_and_report(load_flows(paths, only), **options)


def run_and_report(
    flows: list[Flow],
    *,
    stage: StageName | None,
    jobs: int,
    retries: int,
    timeout: float,
    artifacts: Path | None,
    junit: Path | None,
    html: Path | None,
    as_json: Path | None,
    github: bool | None,
) -> int:
    """Run flows, print each as it ends, and write the reports that were asked for; returns the exit code. Raises
    ConfigError for what the stage cannot do."""
    from nvrx_slurm.jobspec import env
    from nvrx_slurm.lab.flow import report_text
    from nvrx_slurm.lab.flow.artifacts import default_folder
    from nvrx_slurm.lab.flow.stages import check as check_stage
    from nvrx_slurm.lab.flow.stages import choose_stage
    from nvrx_slurm.lab.flow.suite import SuiteOptions, run_suite
    from nvrx_slurm.util.clock import SystemClock

    _check_report("--junit", junit, "junitparser")
    _check_report("--html", html, "jinja2")
    _check_report("--json", as_json)
    os.umask(os.umask(0) | 0o022)  # no other user may write to the files that a flow is judged by
    stage = stage or choose_stage()
    for flow in flows:
        if stage in flow.on:
            check_stage(flow, stage)  # before the folder is made
    options = SuiteOptions(
        stage=stage,
        artifacts=artifacts or default_folder(SystemClock().wall()),
        jobs=jobs,
        retries=retries,
        timeout_s=timeout,
        pages=html.absolute().parent / f"{html.stem}-jobs" if html else None,
    )
    outcome = run_suite(flows, options, on_outcome=lambda flow: click.echo(report_text.flow_line(flow)))
    exit_code = outcome.exit_code

    def not_written(path: object, error: OSError) -> None:
        nonlocal exit_code
        note(f"{path}: cannot be written: {error.strerror}")
        exit_code = exit_code or EXIT_FAILED

    for path, text in _reports(outcome, junit, html, as_json):
        try:
            report_text.write(path, text)
        except OSError as error:  # the others, and what was found, come all the same
            not_written(path, error)
    # What was found: as GitHub folds and annotates it, or as text.
    places = env.github() or (env.GitHub() if github else None)
    if places is None or github is False:
        for line in report_text.closing(outcome, Path.cwd()):
            click.echo(line)
    else:
        from nvrx_slurm.lab.flow.report_github import announce

        try:
            announce(outcome, places, options.artifacts)
        except BrokenPipeError:  # of standard output
            raise
        except OSError as error:
            not_written(error.filename, error)
        click.echo(report_text.summary(outcome))
    return exit_code


def _reports(
    outcome: SuiteOutcome, junit: Path | None, html: Path | None, as_json: Path | None
) -> Iterator[tuple[Path, str]]:
    """The text of each report that was asked for."""
    if junit:
        import socket

        from nvrx_slurm.lab.flow.report_junit import document

        yield junit, document(outcome, socket.gethostname(), Path.cwd())
    if html:
        from nvrx_slurm.lab.flow.report_html import page

        yield html, page(outcome, Path.cwd(), file=html)
    if as_json:
        from nvrx_slurm.lab.flow.outcome import to_json

        yield as_json, to_json(outcome).decode()


def _check_report(option: str, path: Path | None, package: str | None = None) -> None:
    """Now, not when all flows have run. Raises MissingProgramError, and UsageError where it cannot be written."""
    if path is None:
        return
    if package is not None and importlib.util.find_spec(package) is None:
        raise MissingProgramError(f"{option} needs the package {package}: pip install 'nvrx-slurm[ci]'")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:  # no report yet: there is none where nothing was run
            path.unlink()
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be written: {error.strerror}") from None


@click.command()
@_paths
@_only
@click.option("--on", "stage", type=_STAGE, help="Default: each that a flow names.")
def check(paths: tuple[Path, ...], only: tuple[str, ...], stage: StageName | None) -> None:
    """Load the flows of PATHS and check all that can be checked without running them."""
    from nvrx_slurm.lab.flow.load import load_flows
    from nvrx_slurm.lab.flow.stages import check as check_stage

    flows = load_flows(paths, only)
    for flow in flows:
        for each in flow.on if stage is None else [stage] if stage in flow.on else []:
            check_stage(flow, each)
        click.echo(one_line(f"{flow.name}: on {', '.join(flow.on)}"))


@click.command()
def schema() -> None:
    """Print the JSON Schema of a flow file."""
    import json

    from nvrx_slurm.lab.flow.schema import flow_schema

    click.echo(json.dumps(flow_schema(), indent=2))


@click.command()
@click.argument("artifacts", nargs=-1, required=True, type=click.Path(path_type=Path))
def clean(artifacts: tuple[Path, ...]) -> int:
    """End what killed runs have left: jobs, clusters, processes. It can be repeated.

    ARTIFACTS are the artifacts folders of those runs.
    """
    from nvrx_slurm.lab.flow.artifacts import check_over
    from nvrx_slurm.lab.flow.guard import clean as clean_up

    for folder in artifacts:
        if not folder.is_dir():
            raise UsageError(f"{folder}: is no folder; name the artifacts folder of a run")
        check_over(folder)
    problems = [problem for folder in artifacts for problem in clean_up(folder.absolute())]
    for problem in problems:
        note(problem)
    return EXIT_FAILED if problems else EXIT_DONE


@click.command()
@click.option(
    "--of",
    type=click.Choice(["job", "inprocess", "transport"]),
    default="job",
    show_default=True,
    help="What is simulated: controller and agents; ranks that restart in process; payloads and their readers.",
)
@click.option("--seeds", type=click.IntRange(1), default=10_000, show_default=True, help="How many runs.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="The first of their seeds.")
@click.option("--nodes", type=click.IntRange(1), help="Nodes of a job, at most. Default: 8, now and then up to 64.")
@click.option("--seed", type=click.IntRange(0), help="Run this one again, and print its journal.")
@click.option("--scenario", type=_FILE, help="The same for the scenario of a file, as a broken promise prints it.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes that run them.")
@click.option("--minutes", type=click.FloatRange(min=0.0), help="Run for so long, guided by coverage (Python 3.12).")
@click.option("--corpus", multiple=True, type=_FOLDER, help="With --minutes: scenarios to begin with; repeatable.")
@click.option("--keep", type=_FOLDER, help="With --minutes: where new scenarios of the corpus are written.")
def simulate(
    of: str,
    seeds: int,
    first: int,
    nodes: int | None,
    seed: int | None,
    scenario: Path | None,
    jobs: int,
    minutes: float | None,
    corpus: tuple[Path, ...],
    keep: Path | None,
) -> int:
    """Run the product's code against an adversary, in virtual time, and check its promises after every step.

    Exits with 1 on the first promise that is broken: prints the seed, the simplest job with the fewest faults that
    still break it, the journal, and the line that replays it.
    """
    options = {"--nodes": nodes, "--scenario": scenario, "--minutes": minutes, "--corpus": corpus, "--keep": keep}
    given = [name for name, value in options.items() if value not in (None, ())]
    if of != "job" and given:
        raise UsageError(f"--of {of} takes no {', '.join(given)}: these are for --of job")
    if seed is not None and minutes is not None:
        raise UsageError("--seed runs one seed, and --minutes seeds of its own: give one of them")
    if minutes is None and (corpus or keep is not None):
        raise UsageError("--corpus and --keep take effect with --minutes alone")
    if of != "job":
        try:
            from nvrx_slurm.lab.simulation import histories
        except ModuleNotFoundError as error:
            raise MissingProgramError(
                f"--of {of} needs the package {error.name}: pip install 'nvrx-slurm[ci]'"
            ) from None
        if seed is not None:
            return histories.replay_history(of, seed, click.echo)
        return histories.run_histories(of, range(first, first + seeds), jobs, click.echo)
    from nvrx_slurm.lab.simulation import seeds as simulation

    if minutes is not None:
        from nvrx_slurm.lab.simulation.exploring import explore

        return explore(minutes, first, nodes, jobs, corpus, keep, click.echo)
    if scenario is not None:
        try:
            return simulation.replay_file(scenario, click.echo)
        except MalformedRecord as error:
            raise UsageError(f"--scenario {scenario}: {error}") from None
    if seed is not None:
        return simulation.replay_seed(seed, nodes, click.echo)
    return simulation.run_seeds(range(first, first + seeds), nodes, jobs, click.echo)
