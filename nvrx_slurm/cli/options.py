"""The job.yaml argument and its flags, shared by every command that takes a job."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nvrx_slurm.cli.attribution_options import Flag, attribution_flags, attribution_options
from nvrx_slurm.cli.attribution_options import JobCommand as JobCommand
from nvrx_slurm.errors import UsageError

if TYPE_CHECKING:
    from nvrx_slurm.jobspec.load import Loaded
    from nvrx_slurm.jobspec.plan import Plan

DEFAULT_FOLDER = "nvrx-jobs"

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class JobChoice:
    """What the user named on the command line."""

    file: Path
    folder: Path
    spares: int | None = None
    nodes: int | None = None
    assignments: tuple[str, ...] = ()
    attribution: tuple[Flag, ...] = ()

    def load(self) -> Loaded:
        """The merged configuration; names deprecated keys on stderr. Raises ConfigError."""
        from nvrx_slurm.jobspec.load import load

        loaded = load(self.file, list(self._flags()))
        for sentence in loaded.deprecated:
            _warn_once(sentence)
        return loaded

    def plan(self, loaded: Loaded) -> Plan:
        """What agents will read."""
        from nvrx_slurm.jobspec.plan import plan

        return plan(loaded.spec, folder=self.folder, job_file=self.file)

    def _flags(self) -> Iterator[tuple[str, str, Any]]:
        from nvrx_slurm.jobspec.load import parse_assignment

        yield from map(parse_assignment, self.assignments)
        for key, value in (("spares", self.spares), ("nodes", self.nodes)):
            if value is not None:
                yield key, f"--{key}", value
        yield from self.attribution


@functools.cache
def _warn_once(sentence: str) -> None:
    click.echo(f"nvrx-slurm: DeprecationWarning: {sentence}", err=True)


folder_option = click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=DEFAULT_FOLDER,
    show_default=True,
    help="Where job folders are kept, on a file system that all nodes share.",
)


def seconds_of(flag: str, text: str) -> float:
    """The seconds of a duration given on the command line. Raises UsageError that names the flag."""
    from nvrx_slurm.util.durations import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text}: {error}") from None


def make_base(folder: Path) -> None:
    """Make the folder that holds job folders (0700), and check that it can be used. Raises UsageError."""
    import tempfile

    from nvrx_slurm.cluster.base import prepare_folder

    prepare_folder(folder)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"--folder {folder}: cannot be written: {error.strerror}") from None


def job_options(command: _F) -> _F:
    """Give a command the argument JOB_YAML and its flags; it is called with `choice: JobChoice`."""

    @click.argument("job_yaml", type=click.Path(path_type=Path), default="job.yaml")
    @click.option("--spares", type=int, help="Hot spares, on top of the nodes that work.")
    @click.option("--nodes", type=int, help="Nodes that work (a job without roles).")
    @click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Any key: --set slurm.time=2h")
    @folder_option
    @attribution_options
    @functools.wraps(command)
    def wrapper(
        *args: Any, job_yaml: Path, spares: int | None, nodes: int | None, assignments: tuple[str, ...], folder: Path,
        **rest: Any,
    ) -> Any:  # fmt: skip
        attribution = tuple(attribution_flags(rest, click.get_current_context().command.params))
        choice = JobChoice(job_yaml, folder, spares, nodes, assignments, attribution)
        return command(*args, choice=choice, **rest)

    return wrapper  # type: ignore[return-value]
