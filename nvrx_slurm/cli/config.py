"""`nvrx-slurm init`, `config`, `render` and `completion`: what happens before a job is submitted."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path

import click

from nvrx_slurm.cli.options import JobChoice, JobCommand, job_options, make_base
from nvrx_slurm.errors import UsageError
from nvrx_slurm.util.terminal import write_exactly

MOST_WIDTH = 40


@click.command()
@click.argument("path", type=click.Path(path_type=Path), default="job.yaml")
@click.option("--roles", is_flag=True, help="A job with several kinds of workers.")
@click.option("--force", is_flag=True, help="Overwrite a job.yaml that exists; train.py is never overwritten.")
def init(path: Path, roles: bool, force: bool) -> None:
    """Write a commented job.yaml to start from, and train.py, which it runs.

    The job trains for a minute, reports its steps, saves checkpoints, and resumes from them after a failure.
    """
    from importlib import resources

    templates = resources.files("nvrx_slurm.jobspec") / "templates"
    text = (templates / ("roles.yaml" if roles else "plain.yaml")).read_text()
    # The script imports nvrx_slurm. Where this environment is not activated, `python` is one without it, or none.
    found = shutil.which("python")
    if found is None or Path(found).parent != Path(sys.executable).parent:
        text = text.replace("python train.py", f"{shlex.quote(sys.executable)} train.py")
    try:
        with path.open("w" if force else "x") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists; name another file, or overwrite it with --force") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    script = path.with_name("train.py")
    try:
        with script.open("x") as file:
            file.write((templates / "train.py").read_text())
        said = f"{path} and {script} are written."
    except FileExistsError:
        said = f"{path} is written. It runs your {script}, which stays as it is."
    except OSError as error:
        raise UsageError(f"{script} cannot be written: {error.strerror}") from None
    click.echo(f"{said} Try it here with `nvrx-slurm run {path}`, then `nvrx-slurm submit {path}`.")


@click.group()
def config() -> None:
    """The merged configuration, and what job.yaml may hold."""


@config.command(cls=JobCommand)
@job_options
@click.option("--origin", is_flag=True, help="Say beside each value where it came from.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def show(choice: JobChoice, origin: bool, as_json: bool) -> None:
    """Every key of JOB_YAML with its value, defaults included.

    Precedence: flag > environment (NVRX_SLURM_…) > job.yaml > site file > default.
    """
    loaded = choice.load()
    rows = [(".".join(map(str, path)), value, str(loaded.origin_of(path))) for path, value in loaded.values().items()]
    if as_json:
        known = {key: {"value": value, "origin": source} if origin else value for key, value, source in rows}
        click.echo(json.dumps(known, indent=2))
        return
    texts = [(key, json.dumps(value, ensure_ascii=False), source) for key, value, source in rows]
    key_width = max(len(key) for key, _, _ in texts)
    # A long value pushes its own origin to the right, not those of all others.
    value_width = min(MOST_WIDTH, max(len(text) for _, text, _ in texts))
    for key, text, source in texts:
        click.echo(
            f"{key:<{key_width}}  {text:<{value_width}}  {source}" if origin else f"{key:<{key_width}}  {text}"
        )


@config.command()
def schema() -> None:
    """The JSON Schema of job.yaml, for editors.

    VS Code: put `# yaml-language-server: $schema=nvrx-job.schema.json` on top of job.yaml.
    """
    from nvrx_slurm.jobspec.schema import job_schema

    click.echo(json.dumps(job_schema(), indent=2))


@click.command(cls=JobCommand)
@job_options
@click.option("--local", is_flag=True, help="The script for this machine, without Slurm.")
def render(choice: JobChoice, local: bool) -> None:
    """Print the job script of JOB_YAML, or of the command after --.

    The script is complete: `sbatch` of it submits the same job, except that SBATCH_ variables then override the
    script. The folder for the logs is created, because Slurm fails a job without a message where it is missing.
    """
    from nvrx_slurm.jobspec.script import render_job

    loaded = choice.load()
    plan = choice.plan(loaded)
    script = render_job(loaded.spec, plan, cluster="local" if local else "slurm", python=sys.executable)
    make_base(choice.folder)
    write_exactly(script)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL.

    bash: put `eval "$(nvrx-slurm completion bash)"` into ~/.bashrc.
    """
    from click.shell_completion import get_completion_class

    from nvrx_slurm.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "nvrx-slurm", "_NVRX_SLURM_COMPLETE").source())
