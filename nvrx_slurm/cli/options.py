"""Arguments and options that several commands share: job.yaml and its flags, the folder of the jobs, durations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nvrx_slurm.errors import UsageError
from nvrx_slurm.jobspec.flags import ATTRIBUTION, BLOCK, DEPRECATED_FLAGS, FLAGS

if TYPE_CHECKING:
    from nvrx_slurm.jobspec.load import Loaded
    from nvrx_slurm.jobspec.plan import Plan

DEFAULT_FOLDER = "nvrx-jobs"

_F = TypeVar("_F", bound=Callable[..., Any])
Flag = tuple[str, str, Any]
"""A dotted key, the flag that sets it, and its value."""


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
        attribution = []
        for option in click.get_current_context().command.params:
            if isinstance(option, AttributionOption) and option.name is not None:
                value = rest.pop(option.name)  # the command itself takes none of them
                if value is not None and value != ():
                    attribution.append(option.flag(value))
        choice = JobChoice(job_yaml, folder, spares, nodes, assignments, tuple(attribution))
        return command(*args, choice=choice, **rest)

    return wrapper  # type: ignore[return-value]


# ------------------------------------------------------------------------- keys below `fault_tolerance.attribution`


class AttributionOption(click.Option):
    """One of these flags: `--help` lists them apart. `key`: what it sets, dotted."""

    def __init__(self, *args: Any, key: str, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.key = key

    def flag(self, value: Any) -> Flag:
        """The value as a layer of configuration has it. A path counts from here, not from where job.yaml lies."""
        name = (self.secondary_opts if value is False else self.opts)[0]
        if isinstance(self.type, click.Path):
            value = str(Path.cwd() / value)
        return self.key, name, list(value) if self.multiple else value


class JobCommand(click.Command):
    """A command that takes job.yaml."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The usual options first, those of failure attribution at the end."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        for title, is_last in (("Options", False), ("Failure attribution", True)):
            listed = (each for each in options if isinstance(each, AttributionOption) is is_last)
            with formatter.section(title):
                formatter.write_dl([record for each in listed if (record := each.get_help_record(ctx))])


_URL, _TIME, _FILE = {"metavar": "URL"}, {"metavar": "DURATION"}, {"type": click.Path(), "metavar": "FILE"}
_SWITCH: dict[str, Any] = {"default": None}
_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "attrsvc_url": (_URL, "Ask the attribution service there why a job failed."),
    "manage_attrsvc": (_SWITCH, "Ask one that the job starts for itself."),
    "enable_lib": (_SWITCH, "Ask the rules that come with this tool (the default)."),
    "enable_mcp": (_SWITCH, "Ask an MCP server."),
    "http_urls": ({**_URL, "multiple": True}, "Ask this service too; repeatable."),
    "timeout": (_TIME, "How long one source may take."),
    "decision_timeout": (_TIME, "How long a restart waits for them."),
    "dry_run": (_SWITCH, "Record what would have been decided, and restart all the same (the default)."),
    "aggregation": ({"type": click.Choice(["any", "all"])}, "How many sources must say STOP."),
    "slack.channel": ({"metavar": "CHANNEL"}, "Send each failure to this Slack channel."),
    "slack.token_file": (_FILE, "The Slack app's token."),
    "dataflow.url": (_URL, "Keep a document of each failure in an index there."),
    "dataflow.index": ({"metavar": "NAME"}, "The index."),
    "dataflow.token_file": (_FILE, "The index's token."),
}
_OLDER: dict[str, dict[str, Any]] = {
    "attribution_endpoint": {"metavar": "URL"},
    "attribution_backends": {"metavar": "URL|mcp", "multiple": True},
    "attribution_loganalysis": {"metavar": "lib|mcp|url"},
}


def attribution_options(command: _F) -> _F:
    """Give a command all of these flags; `--help` does not list deprecated ones."""
    for key, about in reversed(_OLDER.items()):
        command = _option(f"{BLOCK}.{key}", DEPRECATED_FLAGS[key], about, hidden=True)(command)
    for key, (about, text) in reversed(_OPTIONS.items()):
        command = _option(f"{ATTRIBUTION}.{key}", FLAGS[key], about, help=text)(command)
    return command


def _option(key: str, flag: str, about: dict[str, Any], **shown: Any) -> Callable[[_F], _F]:
    spelled = f"{flag}/{flag.replace('--', '--no-', 1)}" if about is _SWITCH else flag
    return click.option(spelled, cls=AttributionOption, key=key, **about, **shown)
