"""What a user most probably meant by a word, a flag or a file that no command takes. Imported after a mistake."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

import click

IS_JOB = (".yaml", ".yml")
MOST_READ_BYTES = 64 << 10


def about_command(name: str, commands: Iterable[str]) -> str:
    """A word in the place of a command: the line to type instead, or nothing."""
    if Path(name).suffix in IS_JOB:
        return f"Did you mean: nvrx-slurm run {name}"
    if Path(name).suffix in (".py", ".sh"):
        return f"Did you mean: {as_command(Path(name))}"
    near = get_close_matches(name, commands, n=1)
    return f"Did you mean {near[0]!r}?" if near else ""


def about_file(file: Path, default: Path) -> str | None:
    """A file that is no job.yaml: what it is, and the line to type instead; None where nothing can be said."""
    if file.suffix in IS_JOB and file != default:
        return None
    try:
        # Bytes, and not all of them: the user may have named a checkpoint by mistake.
        with file.open("rb") as opened:
            text = opened.read(MOST_READ_BYTES)
    except FileNotFoundError:
        if file == default:
            return "there is no such file here: `nvrx-slurm init` writes one, or name your command after --"
        return None
    except OSError:
        return None
    if b"\n#SBATCH" in text:
        return (
            "is an sbatch script, no job.yaml: submit it with sbatch as before, and in it write"
            " `nvrx-slurm run --spares 1 -- COMMAND` where it has `srun COMMAND`"
        )
    if file.suffix in (".py", ".sh") or text.startswith(b"#!"):
        return f"is a script, no job.yaml. To run it: {as_command(file)}"
    return None


def as_command(script: Path) -> str:
    """The line that runs a script without a job.yaml."""
    return f"nvrx-slurm run -- {shlex.join(_runnable([str(script)]))}"


def _runnable(command: list[str]) -> list[str]:
    """The command with an interpreter in front, where it begins with a script: no shell looks for one."""
    interpreter = {".py": ["python"], ".sh": ["bash"]}.get(Path(command[0]).suffix, [])
    return [*interpreter, *command]


def advised(ctx: click.Context, error: click.UsageError, args: list[str]) -> click.UsageError:
    """The error about a word or a flag that no job's command takes, with what was meant, where that can be said."""
    flag = getattr(error, "option_name", "")
    known = [name for each in ctx.command.params for name in each.opts]
    takes_value = {name for each in ctx.command.params if not getattr(each, "is_flag", True) for name in each.opts}
    first = 0  # the first word that is no flag and no flag's value
    while first < len(args) and args[first].startswith("-") and args[first] != flag:
        first += 2 if args[first] in takes_value else 1
    if flag in ("-n", "--ntasks", "--ntasks-per-node"):
        advice = "One task runs on each node, its agent; --workers-per-node is how many workers it starts"
    elif first < len(args) and args[first] != flag and Path(args[first]).suffix not in IS_JOB:
        typed = [*args[:first], "--", *_runnable(args[first:])]
        advice = f"A command stands after --: {ctx.command_path} {shlex.join(typed)}"
    elif owners := _owners(flag, ctx):
        advice = f"{flag} is a flag of {' and '.join(f'nvrx-slurm {name}' for name in owners)}"
    elif flag.startswith("--"):
        longer = [name for name in known if name.startswith(flag)]
        near = [*longer, *(getattr(error, "possibilities", None) or ())][:1]
        advice = "".join(f"Did you mean {name}? " for name in near)
        if flag.startswith("--ft-"):
            advice += "Flags of ft_launcher stand behind -- ft_launcher"
        elif not longer:
            advice += f"Another flag of sbatch is written --set slurm.extra.{flag[2:]}=VALUE"
    else:
        return error
    return click.UsageError(f"{error.message}\n{advice}", ctx)


def _owners(flag: str, ctx: click.Context) -> list[str]:
    """The other commands for jobs that take the flag."""
    root, owners = ctx.find_root(), []
    for name in ("run", "submit", "render"):
        command = root.command.get_command(root, name) if isinstance(root.command, click.Group) else None
        if command not in (None, ctx.command) and any(flag in each.opts for each in command.params):
            owners.append(name)
    return owners
