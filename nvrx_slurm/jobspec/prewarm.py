"""`prewarm` of job.yaml, and which commands can be started from a warm process."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Literal

from nvrx_slurm.jobspec.reading import After, Before, Block, Written, shown
from nvrx_slurm.jobspec.values import AS_LIST, TEXT_OR_LIST, Duration, Line, Size

_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


def _is_module(text: object) -> bool:
    return isinstance(text, str) and all(part.isidentifier() for part in text.split("."))


def _modules(value: object) -> object:
    """`auto`, or the modules' names: a list, or text with commas, as `--prewarm` takes it."""
    if isinstance(value, str):
        if value.strip() == "auto":
            return "auto"
        value = [name.strip() for name in value.split(",")]
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"must be `auto` or a list of modules, not {shown(value)}")
    for name in value:
        if name == "auto" and len(value) > 1:
            raise ValueError("`auto` stands alone: it finds all modules by itself")
        if not _is_module(name):
            raise ValueError(f"must be names of modules, such as torch.distributed, not {shown(name)}")
    return tuple(value)


def _function(text: str) -> str:
    module, colon, function = text.partition(":")
    if not (colon and _is_module(module) and _is_module(function)):
        raise ValueError(f"must be like mymodel.warm:prepare, a module and a function of it, not {shown(text)}")
    return text


def _pattern(text: str) -> str:
    if other := next((found for found in _PLACEHOLDER.findall(text) if found != "{rank}"), None):
        raise ValueError(f"can hold {{rank}}, and no other placeholder, not {other}")
    return text


class PrewarmSpec(Block, frozen=True, kw_only=True):
    """Each node keeps a warm process for each of its roles: a Python that has imported these modules. Workers are
    forked from it, and so start without imports. `prewarm: auto` and `prewarm: [torch, mymodel]` are short forms;
    `prewarm: off` switches it off, also for one role. Where a worker cannot be started warm it starts as ever, and
    `nvrx-slurm events` says why. [What is safe to import ahead, and what is not](prewarm.md)."""

    imports: Annotated[
        tuple[str, ...] | Literal["auto"],
        Before(_modules),
        Written(lambda value: value if isinstance(value, str) else list(value)),
        TEXT_OR_LIST,
        "The modules to import. `auto`: those that the workers of the first cycle had imported by their first step.",
    ] = "auto"
    setup: Annotated[
        Annotated[Line, After(_function)] | None,
        "A function to call after the imports, as `module:function`, without arguments. Workers share what it leaves "
        "in memory.",
    ] = None
    read: Annotated[
        Annotated[tuple[Annotated[Line, After(_pattern)], ...], AS_LIST, TEXT_OR_LIST],
        "Files to read into the page cache of each node, ahead of the workers: patterns such as "
        "`checkpoints/latest/**`, relative to the folder of job.yaml. `{rank}`: the ranks of that node.",
    ] = ()
    memory: Annotated[
        Size | None,
        "What a warm process may allocate; with more, workers start cold. It also bounds what `read` reads on a "
        "node. Not set: no limit of the process, and a fourth of the node's available memory to read.",
    ] = None
    timeout: Annotated[Duration, "How long the imports and `setup` may take. Then workers start cold."] = 120.0

    @classmethod
    def long_form(cls, value: object) -> object:
        word = str(value).strip().lower() if isinstance(value, (str, bool)) else None
        if word in ("off", "false"):
            return {"imports": []}
        if word in ("auto", "on", "true"):
            return {"imports": "auto"}
        if not isinstance(value, (str, list, tuple)):
            return value
        return {"imports": list(value) if isinstance(value, tuple) else value}

    @property
    def is_off(self) -> bool:
        """Whether nothing is left to do ahead of the workers."""
        return not (self.imports or self.setup or self.read)

    @property
    def wants_process(self) -> bool:
        """Whether there is something to import or to call: `read` alone needs no warm process."""
        return bool(self.imports or self.setup)


# ------------------------------------------------------------------------------- which commands can be started warm


_INTERPRETER = re.compile(r"(?:python|pypy)(?:[23](?:\.\d+)*)?[dt]*")
_WITH_VALUE = "WX"
_WITHOUT_VALUE = "bBdOPqRstuvx"
_ENDS_OPTIONS = "cm"
_LONG_WITH_VALUE = "--check-hash-based-pycs"
_COLD_OPTIONS = {
    "I": "leaves out the start-up hook",
    "E": "leaves out the start-up hook",
    "S": "leaves out the start-up hook",
    "i": "reads commands from stdin",
    "h": "only prints a text",
    "?": "only prints a text",
    "V": "only prints a text",
}
_PRINTING = ("--help", "--help-all", "--help-env", "--help-xoptions", "--version")
# More than the 256 bytes in which the kernel looks for the interpreter: for a longer path pip writes two lines.
_FIRST_LINES_BYTES = 1024


def probe_command(command: Sequence[str], find: Callable[[str], str | None]) -> tuple[str, ...]:
    """The words that start the same interpreter as a command (with `env` before it where a script says so), with the
    same options, up to `-c`: the caller appends the code. `find`: the path of a program, by the PATH and the folder
    of the workers, as `shutil.which` finds it.

    Raises ValueError with the reason where no worker with this command can be forked from a warm process. One can
    where CPython reads PYTHONPATH and then runs a script, `-m` or `-c`: the start-up hook comes before them.
    """
    program, *words = command
    path = find(program)
    if path is None:
        raise ValueError(f"the command was not found: {program}")
    starts: tuple[str, ...] = (program,)
    if not _is_interpreter(program):
        starts, options = _first_line(path, program)
        words = [*options, path]
    return (*starts, *_options(words, PurePath(starts[-1]).name), "-c")


def _is_interpreter(word: str) -> bool:
    return _INTERPRETER.fullmatch(PurePath(word).name) is not None


def _options(words: Sequence[str], interpreter: str) -> tuple[str, ...]:
    """Those of the interpreter, without `-c`, `-m` and what follows. Raises ValueError with the reason to start cold,
    also for an option that CPython would refuse: the worker itself reports that.

    As CPython's getopt: letters share a word, a value stands in the same word or in the next one, and the options end
    at `-c`, at `-m`, at `--` and at the script.
    """
    options: list[str] = []
    rest = list(words)
    while rest and rest[0] != "-" and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        if word in _PRINTING:
            raise ValueError(f"{interpreter} runs with {word}, which only prints a text")
        if word == _LONG_WITH_VALUE:
            options += [word, *rest[:1]]
            rest = rest[1:]
            continue
        for at, letter in enumerate(word[1:], 1):
            if letter in _COLD_OPTIONS:
                raise ValueError(f"{interpreter} runs with -{letter}, which {_COLD_OPTIONS[letter]}")
            if letter in _ENDS_OPTIONS:
                # Nothing follows `-c` or `-m`: the worker itself shows Python's own message.
                if not word[at + 1 :] and not rest:
                    raise ValueError(f"{interpreter} runs with -{letter}, and without what that needs")
                # Of `-um` the `-u` stays: the warm process must run with the worker's own options.
                return (*options, *([word[:at]] if at > 1 else []))
            if letter in _WITH_VALUE:
                options += [word] if word[at + 1 :] else [word, *rest[:1]]
                rest = rest if word[at + 1 :] else rest[1:]
                break
            if letter not in _WITHOUT_VALUE:
                raise ValueError(f"{interpreter} runs with {word}, which is no option of Python")
        else:
            options.append(word)
    if not rest or rest[0] == "-":
        raise ValueError(f"{interpreter} reads its program from stdin")
    return tuple(options)


def _first_line(path: str, program: str) -> tuple[tuple[str, ...], list[str]]:
    """What the kernel starts for a script: the interpreter, and the options from the script's first line.

    Raises ValueError with the reason to start cold.
    """
    try:
        with Path(path).open("rb") as file:
            first, _, rest = file.read(_FIRST_LINES_BYTES).partition(b"\n")
    except OSError as error:
        raise ValueError(f"the command cannot be read: {program}: {error.strerror}") from None
    no_python = ValueError(f"the command is no Python program: {program}")
    if not first.startswith(b"#!"):
        raise no_python
    starts: tuple[str, ...]
    line = first[2:].decode(errors="surrogateescape").strip()
    if line == "/bin/sh" and rest.startswith(b"'''exec' "):
        # pip's script where the interpreter's path is too long for a first line, or holds a space
        line = rest.partition(b"\n")[0].decode(errors="surrogateescape")
        try:
            _, interpreter, *options = shlex.split(line)
        except ValueError:
            raise no_python from None
        starts, options = (interpreter,), [option for option in options if option not in ("$0", "$@")]
    else:
        # The kernel passes all after the interpreter as one word.
        interpreter, _, option = line.partition(" ")
        option = option.strip()
        starts, options = (interpreter,), [option] if option else []
        if PurePath(interpreter).name == "env" and option:
            split = option.removeprefix("-S")
            try:
                python, *options = shlex.split(split) if split != option else [option]
            except ValueError:
                raise no_python from None
            starts = (interpreter, python)
    if not _is_interpreter(starts[-1]):
        raise no_python
    return starts, options
