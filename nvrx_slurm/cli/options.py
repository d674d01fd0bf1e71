"""Arguments and options that several commands share: a job's file, command and flags, the folder of the jobs."""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nvrx_slurm.cli.completion import complete_keys
from nvrx_slurm.errors import ConfigError, UsageError
from nvrx_slurm.jobspec.flags import ATTRIBUTION, ATTRIBUTION_FLAGS, BLOCK, DEPRECATED_FLAGS, JOB_FLAGS, SBATCH_FLAGS

if TYPE_CHECKING:
    from nvrx_slurm.jobspec.load import Loaded
    from nvrx_slurm.jobspec.plan import Plan

DEFAULT_FOLDER = "nvrx-jobs"
DEFAULT_FILE = Path("job.yaml")

_F = TypeVar("_F", bound=Callable[..., Any])
# A dotted key, the flag that sets it, and its value.
Flag = tuple[str, str, Any]


@dataclass(frozen=True, slots=True)
class JobChoice:
    """The job that the user named on the command line: a file, a command after `--`, or both.

    `file` is None: the command line alone describes the job. `flags`: of two for one key the last one counts.
    """

    file: Path | None
    folder: Path
    flags: tuple[Flag, ...] = ()
    command: tuple[str, ...] = ()

    def load(self) -> Loaded:
        """The merged configuration; names deprecated keys on stderr. Raises ConfigError."""
        from nvrx_slurm.jobspec.load import load

        if len(self.command) == 1 and " " in self.command[0] and not os.path.exists(self.command[0]):
            raise ConfigError(f"is one word, {self.command[0]!r}: write it without quotes", key="command")
        flags = [*self.flags, ("command", "the command after --", list(self.command))] if self.command else self.flags
        try:
            loaded = load(self.file, flags, instead={"name": name_of(self.command)})
        except ConfigError:
            from nvrx_slurm.cli.advice import about_file

            if self.file is not None and (advice := about_file(self.file, DEFAULT_FILE)):
                raise ConfigError(advice, file=str(self.file)) from None
            raise
        for sentence in loaded.deprecated:
            _warn_once(sentence)
        return loaded

    def plan(self, loaded: Loaded) -> Plan:
        """What agents will read."""
        from nvrx_slurm.jobspec.plan import plan

        return plan(loaded.spec, folder=self.folder, job_file=self.file)

    def saved(self, path: Path) -> JobChoice:
        """Write the file and the flags of this choice as one file, and choose that. Raises UsageError, also where
        the file exists or would mean another job, since its paths count from another folder."""
        from nvrx_slurm.jobspec.load import write_job

        loaded = self.load()
        write_job(path, loaded)
        # Read back as a later command reads it: without the flags, and relative paths count from its new place.
        alone = JobChoice(path, self.folder)
        if alone.plan(alone.load()) != self.plan(loaded):
            # The file was written just now: `write_job` replaces none.
            path.unlink()
            raise UsageError(
                f"--save {path}: its paths would count from another folder; save it beside"
                f" {self.file or 'the files that they name'}, or write absolute paths"
            )
        return replace(self, file=path)


def name_of(command: tuple[str, ...]) -> str:
    """The name of a job that has none: that of its script, of its module, or of its program.

    >>> name_of(("python", "-u", "src/train.py", "--lr", "0.1")), name_of(("python", "-m", "my.task"))
    ('train', 'my.task')
    """
    scripts = [word for word in command if word.endswith((".py", ".sh"))]
    modules = [word for flag, word in itertools.pairwise(command) if flag == "-m"]
    name = Path((scripts or modules or command or ("",))[0]).name.removesuffix(".py").removesuffix(".sh")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")[:64] or "job"


@functools.cache
def _warn_once(sentence: str) -> None:
    click.echo(f"nvrx-slurm: DeprecationWarning: {sentence}", err=True)


def with_options(*options: Callable[[Any], Any]) -> Callable[[_F], _F]:
    """Give a command these options, which `--help` lists in this order."""

    def decorate(command: _F) -> _F:
        # click lists the option first that was added last.
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


folder_option = click.option(
    "--folder",
    type=click.Path(path_type=Path),
    envvar="NVRX_SLURM_FOLDER",
    default=DEFAULT_FOLDER,
    show_default=True,
    show_envvar=True,
    help="Where job folders are kept, on a file system that all nodes share.",
)


def _in_seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    from nvrx_slurm.util.durations import parse_duration

    try:
        return None if value is None else parse_duration(value)
    except ValueError as error:
        raise UsageError(f"{param.opts[0]} {value}: {error}") from None


def duration_option(flag: str, about: str, default: str | None = None) -> Callable[[_F], _F]:
    """Give a command an option such as `--timeout 10m`; it is called with seconds."""
    return click.option(
        flag, metavar="DURATION", callback=_in_seconds, default=default, show_default=default is not None, help=about
    )


def _as_moment(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    from nvrx_slurm.util.clock import SystemClock
    from nvrx_slurm.util.durations import parse_moment

    try:
        return None if value is None else parse_moment(value, SystemClock().wall())
    except ValueError as error:
        raise UsageError(f"{param.opts[0]}: {error}") from None


def since_option(about: str) -> Callable[[_F], _F]:
    """Give a command the option --since; it is called with `since: float | None`, in seconds since the epoch."""
    return click.option("--since", metavar="WHEN", callback=_as_moment, help=about)


def output_option(what: str, default: str) -> Callable[[_F], _F]:
    """Give a command the option --output, the file that it writes."""
    about = f"Where to write the {what} [default: {default}]; - is standard output."
    path = click.Path(path_type=Path, dir_okay=False)
    return click.option("-o", "--output", type=path, metavar="FILE", help=about)


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


class KeyOption(click.Option):
    """A flag that sets a key of job.yaml. `key`: which, dotted; `title`: where `--help` lists it."""

    def __init__(self, *args: Any, key: str, title: str = "Options", **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.key, self.title = key, title

    def flag(self, value: Any) -> Flag:
        """The value as a layer of configuration has it. A path counts from here, not from where job.yaml lies."""
        name = self.secondary_opts[0] if value is False else max(self.opts, key=len)
        if isinstance(self.type, click.Path):
            here = str(Path.cwd())
            # Of `output` only what the user wrote is a pattern.
            value = str(Path(here.replace("%", "%%") if self.key == "output" else here) / value)
        least, is_range, most = str(value).partition("-")
        if self.key == "nodes" and is_range and least.isdecimal() and most.isdecimal():
            spares = f"--spares 0..{int(most) - int(least)}"
            raise click.UsageError(
                f"{name} {value}: how many nodes work is one number; {name} {least} {spares} takes up to so many as"
                " hot spares, and min_nodes is how few a job goes on with"
            )
        return self.key, name, list(value) if self.multiple else value


AS_SBATCH, FAILURE_ATTRIBUTION = "As for sbatch", "Failure attribution"


def job_options(command: _F) -> _F:
    """Give a command (of JobCommand) the argument JOB_YAML, the command after `--`, and the flags of a job; it is
    called with `choice: JobChoice`."""

    @click.argument("job_yaml", type=click.Path(path_type=Path), required=False)
    @_key_options(JOB_FLAGS)
    @click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", shell_complete=complete_keys,
                  help="Any key: --set slurm.time=2h")  # fmt: skip
    @click.option("--save", type=click.Path(path_type=Path), metavar="FILE", help="Write the job as a file, too.")
    @folder_option
    @click.option("--help-all", is_flag=True, is_eager=True, expose_value=False, callback=_help_all,
                  help="Also show the flags of failure attribution.")  # fmt: skip
    @_key_options(SBATCH_FLAGS, title=AS_SBATCH)
    @click.option("-o", "--output", cls=KeyOption, key="output", title=AS_SBATCH, type=click.Path(),
                  metavar="PATTERN", help="Link to the log of all workers: logs/%x-%j.out.")  # fmt: skip
    @attribution_options
    @functools.wraps(command)
    def wrapper(
        *args: Any, job_yaml: Path | None, assignments: tuple[str, ...], save: Path | None, folder: Path, **rest: Any
    ) -> Any:
        from nvrx_slurm.jobspec.load import parse_assignment

        context = click.get_current_context()
        flags = [parse_assignment(text) for text in assignments]
        # Behind those of --set: of two for one key the last one counts.
        for option in context.command.params:
            if isinstance(option, KeyOption) and option.name is not None:
                value = rest.pop(option.name)  # the command itself takes none of them
                if value is not None and value != ():
                    flags.append(option.flag(value))
        typed: tuple[str, ...] = context.meta.get(_TYPED, ())
        file = job_yaml or (None if typed else DEFAULT_FILE)
        choice = JobChoice(file, folder, tuple(flags), typed)
        return command(*args, choice=choice if save is None else choice.saved(save), **rest)

    return wrapper  # type: ignore[return-value]


def _key_options(table: dict[str, tuple[tuple[str, ...], str, str]], **about: str) -> Callable[[_F], _F]:
    return with_options(
        *(
            click.option(*spelled, cls=KeyOption, key=key, metavar=takes, help=text, **about)
            for key, (spelled, takes, text) in table.items()
        )
    )


# What a context keeps: the command after `--`; that `--help-all` was given.
_TYPED, _ALL = "nvrx_slurm.typed", "nvrx_slurm.help_all"


def _help_all(ctx: click.Context, _: click.Parameter, is_given: bool) -> None:
    # The shell's completion parses the line, too, and reads what is printed.
    if is_given and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


class JobCommand(click.Command):
    """A command that takes a job: JOB_YAML, `-- COMMAND`, or both."""

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """What stands after the first `--` is the job's command; click would take it for arguments. Words of torchrun
        are translated."""
        typed: list[str] = []
        if "--" in args:
            at = args.index("--")
            args, typed = args[:at], args[at + 1 :]
            if not typed:
                ctx.fail("there is no command after --")
            if len(typed) == 1 and typed[0].endswith((".yaml", ".yml")):  # `--` as other tools have it; no program
                args, typed = args + typed, []
        args, typed = _without_launcher(args, typed, is_run=ctx.info_name == "run" and "--here" not in args)
        if typed:
            ctx.meta[_TYPED] = tuple(typed)
        try:
            # A copy: click takes words out of the list, and the advice needs all of them.
            return super().parse_args(ctx, list(args))
        except click.UsageError as error:
            if not isinstance(error, click.NoSuchOption) and "unexpected extra" not in error.message:
                raise
            from nvrx_slurm.cli.advice import advised

            raise advised(ctx, error, args) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The usual options first, those of failure attribution last, and only for `--help-all`."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], AS_SBATCH: [], FAILURE_ATTRIBUTION: []}
        for each in options:
            if record := each.get_help_record(ctx):
                sections[getattr(each, "title", "Options")].append(record)
        if not ctx.meta.get(_ALL):
            del sections[FAILURE_ATTRIBUTION]
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _without_launcher(args: list[str], typed: list[str], *, is_run: bool) -> tuple[list[str], list[str]]:
    """The arguments and the job's command without torchrun and its flags. `is_run`: the job may run in the allocation
    that the command is called in. What is ignored is said on stderr. Raises UsageError."""
    from nvrx_slurm.jobspec import env, launchers

    nodes, gpus = env.get("SLURM_JOB_NUM_NODES"), env.get("SLURM_GPUS_ON_NODE")
    # For `--nproc-per-node gpu`. What the line asks for counts before what this node has: `h100:8`, or `8`.
    for word, value in itertools.pairwise([*args, ""]):
        flag, equals, own_value = word.partition("=")
        if flag == "--gpus-per-node":
            gpus = (own_value if equals else value).rpartition(":")[2]
    allocated = int(nodes) if is_run and nodes and nodes.isdecimal() else None
    own = launchers.own_flags(args, allocated=allocated, gpus=gpus)
    found = launchers.unwrapped(typed, allocated=allocated, gpus=gpus) if typed else None
    name, theirs = found or ("torchrun", launchers.Translation((), tuple(typed), ()))
    if ignored := dict.fromkeys((*own.ignored, *theirs.ignored)):
        click.echo(f"nvrx-slurm: not needed here, and ignored: {name}'s {', '.join(ignored)}", err=True)
    return [*theirs.flags, *own.flags, *own.rest], list(theirs.rest)


# ------------------------------------------------------------------------- keys below `fault_tolerance.attribution`


# What a flag takes → how click reads it; anything else is a word.
_KINDS: dict[str, dict[str, Any]] = {
    "": {"default": None},  # `--flag/--no-flag`, which sets nothing where it is not given
    "any|all": {"type": click.Choice(["any", "all"])},
    "FILE": {"type": click.Path(), "metavar": "FILE"},
}
_REPEATABLE = ("http_urls", "attribution_backends")


def attribution_options(command: _F) -> _F:
    """Give a command all of these flags; `--help` does not list deprecated ones, which have no text."""
    options = []
    for block, table in ((ATTRIBUTION, ATTRIBUTION_FLAGS), (BLOCK, DEPRECATED_FLAGS)):
        for key, (flag, takes, text) in table.items():
            spelled = flag if takes else f"{flag}/{flag.replace('--', '--no-', 1)}"
            about = _KINDS.get(takes, {"metavar": takes}) | {"help": text, "hidden": not text}
            about |= {"key": f"{block}.{key}", "title": FAILURE_ATTRIBUTION, "multiple": key in _REPEATABLE}
            options.append(click.option(spelled, cls=KeyOption, **about))
    return with_options(*options)(command)
