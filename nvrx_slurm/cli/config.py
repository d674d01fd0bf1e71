"""`nvrx-slurm config`"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

from nvrx_slurm.cli.options import JobChoice, JobCommand, job_options

MOST_WIDTH = 40


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
    from nvrx_slurm.jobspec.reading import written

    loaded = choice.load()
    leaves = list(_leaves(written(loaded.spec), ()))
    if as_json:
        rows = {
            ".".join(path): {"value": value, "origin": str(loaded.origin_of(path))} if origin else value
            for path, value in leaves
        }
        click.echo(json.dumps(rows, indent=2))
        return
    # One key a line. A long value pushes its own origin aside, not those of all others.
    texts = [
        (".".join(path), json.dumps(value, ensure_ascii=False), str(loaded.origin_of(path))) for path, value in leaves
    ]
    key_width = max(len(key) for key, _, _ in texts)
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


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value
