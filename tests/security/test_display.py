"""Text from workers, records, node names and files reaches a terminal, a report or a CI log as text, never as control
sequences.

Each command that shows a job runs, through a pipe and on a terminal, on a job folder in which every text field of
every record is hostile. A command that is not listed here fails the test: add it, with the arguments to run it with.
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import click
import msgspec
import pytest

from nvrx_slurm.cli import cli
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.journal import records
from nvrx_slurm.journal.folder import JobFolder, JobInfo, Result
from nvrx_slurm.journal.records import Entry, entry_to_json
from nvrx_slurm.lab.plans import plain_bounds
from nvrx_slurm.util.ids import replica_id
from tests.forks import Forked, command_line
from tests.slurm_harness import CLI

BOUND_S = 100.0
HOSTILE = (
    "a\x1b]0;owned\x07\x1b[2J\x1b[8mhidden\x9b31m\x7f\x08\x1b]8;;https://evil.example\x07link\x1b\\"
    "\u202egpj.\u2066\u200b\ufeff\udc9b [link=https://evil.example]x[/link] ##[error]runner "
    "\r::add-mask::secret\n::error::forged\u2028::stop-commands::x"
)
UTF8 = HOSTILE.replace("\udc9b", "")
"""The hostile text that a record can hold: its bytes are valid UTF-8."""
NAME = UTF8.replace("/", "")[:80]
"""The hostile text that can be a file's name."""
PART = "r\x9b31m\u202e\u200b\ufeff\u2028::error::##[error]"
"""A hostile name that can become a part of a path: without the characters that the records refuse."""
RAW = UTF8.encode() + b"\x9b31m \xff \x1b[31mred\n"

UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
OUR_COLOURS = re.compile("\x1b\\[[0-9;]*m")
LIVE_SCREEN = re.compile("\x1b\\[(?:\\?25[lh]|[0-9]*[AK]|H)|\r")
"""How rich redraws a screen: cursor off and on, up a line, erase a line, home."""

JOB = "hostile"

TRIED: dict[str, list[list[str]]] = {
    "status": [["JOB"], ["JOB", "--json"], [], ["--json"], ["JOB", "--watch"], [NAME]],
    "ls": [[], ["--json"]],
    "rm": [["JOB", "--dry-run"], [NAME]],
    "events": [["JOB"], ["JOB", "--json"], ["JOB", "-f"], ["JOB", "--utc"]],
    "logs": [
        ["JOB"],
        ["JOB", "--grep", "."],
        ["JOB", "--rank", "1"],
        ["JOB", "--cycle", "1"],
        ["JOB", "--replica", "none"],
        ["JOB", "-f"],
    ],
    "report": [["JOB", "-o", "-"], ["JOB", "-o", "page.html"], ["--since", "1d", "-o", "-"], [NAME]],
    "trace": [["JOB", "-o", "-"], [NAME]],
    "metrics": [["JOB"], [NAME]],
    "explain": [["JOB"], ["JOB", "--json"], ["JOB", "--cycle", "99"]],
    "analyze": [["FOLDER/logs"], ["FOLDER/logs", "--json"], [NAME]],
    "attribution report": [["JOB"], ["--json"], []],
    "attribution flush": [["JOB"], []],
    "dump": [["JOB"], ["JOB", "--json"]],
    "wait": [["JOB"]],
    "cancel": [["JOB"], [NAME]],
    "restart": [["JOB"]],
    "drain": [["JOB", NAME]],
    "undrain": [["JOB", NAME]],
    "doctor": [["BROKEN_YAML"]],
    "nodes": [["--ledger", "LEDGER", "--cluster", "c"], ["--ledger", "LEDGER", "--cluster", "c", "--json"]],
    "nodes suspect": [[NAME, "--why", "x"]],
    "nodes clear": [["--all"]],
    "ci replay": [["FOLDER/events.jsonl"]],
    "ci record": [["FOLDER/events.jsonl"]],
    "ci check": [["FLOW"]],
    "ci run": [["FLOW"]],
    "ci clean": [["FOLDER"]],
    "config show": [["JOB_YAML"], ["JOB_YAML", "--json"], ["BROKEN_YAML"]],
    "render": [["BROKEN_YAML"]],
    "submit": [["BROKEN_YAML", "--dry-run"]],
    "run": [["BROKEN_YAML"]],
    "cluster status": [["--name", NAME]],
}
"""Command → its arguments. Words in capitals stand for the files below."""

NOT_TRIED = {
    "init", "config schema", "completion", "attrsvc", "mcp", "transport doctor", "transport sweep", "ci schema",
    "ci matrix", "cluster up", "cluster down", "cluster env", "cluster kill-node", "cluster stop-node",
    "cluster restore-node", "ci simulate", "store acl", "demo", "exec", "top",
}  # fmt: skip
"""These show no text of other origin. `ci matrix` prints as `ci run` does. The output of `exec` is that of its
program, as under ssh. What `top` draws is tested in test_top."""


SILENT = ("wait", "attribution flush", "ci clean")
"""These may print nothing here. `wait` exits with the exit code of its job, which is 1."""


def commands(group: click.Group = cli, path: tuple[str, ...] = ()) -> Iterator[str]:
    """The full name of every command."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield " ".join((*path, name))
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


def hostile(kind: Any) -> Any:
    """A value of this type in which every text is hostile."""
    return _value(msgspec.inspect.type_info(kind))


def _value(kind: Any) -> Any:
    match kind:
        case msgspec.inspect.UnionType():
            known = [each for each in kind.types if not isinstance(each, msgspec.inspect.NoneType)]
            return _value(next((each for each in known if isinstance(each, msgspec.inspect.StrType)), known[0]))
        case msgspec.inspect.StrType():
            return next(text for text in (UTF8, PART, "n1") if not kind.pattern or re.search(kind.pattern, text))
        case msgspec.inspect.LiteralType():
            return kind.values[0]
        case msgspec.inspect.EnumType():
            return next(iter(kind.cls))
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.IntType():
            return 1
        case msgspec.inspect.FloatType():
            return 1.5
        case msgspec.inspect.TupleType():
            return tuple(map(_value, kind.item_types))
        case msgspec.inspect.VarTupleType():
            return (_value(kind.item_type),)
        case msgspec.inspect.ListType():
            return [_value(kind.item_type)]
        case msgspec.inspect.DictType():
            return {_value(kind.key_type): _value(kind.value_type)}
        case msgspec.inspect.StructType():
            return kind.cls(**{field.name: _value(field.type) for field in kind.fields})
        case msgspec.inspect.AnyType() | msgspec.inspect.RawType():
            return UTF8
    raise AssertionError(f"no hostile value of {kind} yet: add one")


def every_record() -> list[Any]:
    kinds = get_args(records.AnyRecord)
    assert all(isinstance(kind, type) for kind in kinds) and isinstance(records.AnyRecord, types.UnionType)
    return [hostile(kind) for kind in kinds]


def journal() -> list[Entry]:
    """Every kind of record, in an order in which a job could write them: a rendezvous is opened before any record
    names it."""
    order = {records.JobStarted: 0, records.NodeJoined: 1, records.RendezvousOpened: 2, records.RendezvousClosed: 3}
    order |= {records.Shutdown: 5, records.JobEnded: 6}
    written = sorted(every_record(), key=lambda each: order.get(type(each), 4))
    return [Entry(n=number, t=1_790_000_000.0 + number, record=record) for number, record in enumerate(written, 1)]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A base folder with two jobs whose texts are all hostile, a ledger, and files for the other commands."""
    base = tmp_path_factory.mktemp("base")
    # Reading a plan fails if a role's name is no file name: the second job shows how commands report that.
    for job, role_name in ((JOB, "main"), (NAME, PART)):
        role = RolePlan(name=role_name, command=(UTF8,), nodes_per_replica=1, workers_per_node=2)
        plan = Plan(
            name=UTF8, roles=(role,), spares=1, workdir=UTF8, folder=str(base), fault_tolerance=plain_bounds()
        )
        folder = JobFolder(base / job)
        folder.create()
        folder.write_plan(plan)
        folder.write_info(JobInfo(job_id=UTF8, name=UTF8, cluster=UTF8, started_at=1.79e9, host=UTF8, nodes=(UTF8,)))
        folder.write_result(Result(exit_code=1, reason=UTF8, ended_at=1.79e9 + 90))
        folder.events_path.write_bytes(b"".join(entry_to_json(entry) + b"\n" for entry in journal()))
        folder.job_log.write_bytes(RAW * 3)
        logs = folder.path / "logs" / replica_id("main", 0) / "gen-0" / "cycle-1"
        logs.mkdir(parents=True)
        (logs / "rank-1.out").write_bytes(RAW)
        (logs / "rank-1.err").write_bytes(
            b'Traceback (most recent call last):\n  File "/w/\x1b[2Jtrain.py", line 7, in <module>\n    import x\n'
            b"ModuleNotFoundError: No module named 'x\x1b]0;owned\x07\xc2\x9b\xe2\x80\xae'\n"
        )
    files = tmp_path_factory.mktemp("files")
    (files / "job.yaml").write_text(json.dumps({"name": "x", "command": ["true", UTF8], "nodes": 1}))
    (files / "broken.yaml").write_text(json.dumps({"name": "x", UTF8: UTF8, "command": 7, "nodes": UTF8}))
    (files / "flow.yaml").write_text(json.dumps({"name": UTF8, UTF8: UTF8, "job": UTF8, "expect": []}))
    blame = {"cluster": "c", "node": UTF8, "kind": "said", "failure": "said", "at": 1.79e9, "evidence": UTF8}
    (files / "ledger.json").write_text(json.dumps({"blames": [blame]}))
    named = {"LEDGER": "ledger.json", "JOB_YAML": "job.yaml", "BROKEN_YAML": "broken.yaml", "FLOW": "flow.yaml"}
    return {
        "BASE": str(base),
        "JOB": JOB,
        "FOLDER": str(base / JOB),
        **{word: str(files / name) for word, name in named.items()},
    }


def argv(command: str, arguments: list[str], places: dict[str, str]) -> list[str]:
    """The arguments after `nvrx-slurm`."""
    words = [re.sub("[A-Z_]{3,}", lambda word: places.get(word[0], word[0]), each) for each in arguments]
    known = "--folder" in help_of(command)
    return [*command.split(), *words, *(["--folder", places["BASE"]] * known)]


def help_of(command: str) -> set[str]:
    """The options of a command."""
    found: click.Command = cli
    for name in command.split():
        assert isinstance(found, click.Group)
        got = found.get_command(click.Context(found), name)
        assert got is not None
        found = got
    return {option for parameter in found.params for option in parameter.opts}


@contextmanager
def ended(process: Forked) -> Iterator[None]:
    """Kill the process at the end of the test, so that the thread that reads its output ends too."""
    try:
        yield
    finally:
        process.kill()
        process.wait()


def piped(words: list[str], tmp_path: Path, **variables: str) -> tuple[int, bytes]:
    """The exit code, and all that the command printed into a pipe."""
    environment = env.child_environment({"XDG_CONFIG_HOME": str(tmp_path), **variables}, without=["GITHUB_ACTIONS"])
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as output, ThreadPoolExecutor(1) as reader:
        read = reader.submit(output.read)
        try:
            process = command_line().start(words, cwd=tmp_path, env=environment, descriptors=(0, writing, writing))
        finally:
            os.close(writing)
        with ended(process):
            return process.wait(BOUND_S), read.result(BOUND_S)


def on_terminal(words: list[str], tmp_path: Path) -> str:
    """All that the command sent to a terminal."""
    terminal, inside = pty.openpty()
    variables = {"XDG_CONFIG_HOME": str(tmp_path), "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}

    def read() -> bytes:
        sent = b""
        with suppress(OSError):  # EIO: the command has ended, and its side of the terminal is closed
            while data := os.read(terminal, 1 << 16):
                sent += data
        return sent

    with ThreadPoolExecutor(1) as reader:
        sent = reader.submit(read)
        try:
            environment = env.child_environment(variables)
            process = command_line().start(words, cwd=tmp_path, env=environment, descriptors=(inside, inside, inside))
        finally:
            os.close(inside)
        with ended(process):
            process.wait(BOUND_S)
            said = sent.result(BOUND_S)
    os.close(terminal)
    return said.decode().replace("\r\n", "\n")


CASES = [(command, arguments) for command, every in TRIED.items() for arguments in every]


@pytest.mark.parametrize(("command", "arguments"), CASES, ids=lambda part: str(part)[:40].encode("unicode_escape"))
def test_nothing_hostile_reaches_a_pipe(
    command: str, arguments: list[str], places: dict[str, str], tmp_path: Path
) -> None:
    """The output into a pipe contains no control character. JSON contains the same values, escaped."""
    code, out = piped(argv(command, arguments, places), tmp_path)
    if command == "logs":
        return  # its bytes are passed on unchanged, which another test checks
    assert "Traceback (most recent call last)" not in out.decode() or command == "analyze"
    assert code in (0, 1, 2, 69), out.decode()
    assert out or code == 0 or command in SILENT, "an error is one clear line"
    assert UNSAFE.findall(out.decode()) == []
    if "--json" in arguments and code == 0:
        for line in [out] if command != "events" else out.splitlines():
            assert "hidden" not in line.decode() or "\x1b[8mhidden\x9b31m" in repr_of(json.loads(line))


def repr_of(value: Any) -> str:
    """All texts of a JSON value, unescaped."""
    match value:
        case dict():
            return "".join(repr_of(each) for pair in value.items() for each in pair)
        case list():
            return "".join(map(repr_of, value))
    return str(value)


@pytest.mark.parametrize(("command", "arguments"), CASES, ids=lambda part: str(part)[:40].encode("unicode_escape"))
def test_nothing_hostile_reaches_a_terminal(
    command: str, arguments: list[str], places: dict[str, str], tmp_path: Path
) -> None:
    """A terminal gets only text and our own colours, and with `logs` the workers' colours too."""
    sent = on_terminal(argv(command, arguments, places), tmp_path)
    if command != "logs":
        assert "\x1b[8m" not in sent
    if "--watch" in arguments:
        sent = LIVE_SCREEN.sub("", sent)
    assert sent or command in SILENT
    assert UNSAFE.findall(OUR_COLOURS.sub("", sent)) == []


@pytest.mark.parametrize(("command", "arguments"), CASES, ids=lambda part: str(part)[:40].encode("unicode_escape"))
def test_a_runner_of_github_actions_gets_no_commands(
    command: str, arguments: list[str], places: dict[str, str], tmp_path: Path
) -> None:
    """A runner obeys `::name::` at the start of a line, and `##[name]` anywhere in one. No command, not even `logs`,
    prints either."""
    if command == "ci run":
        pytest.skip("its reports contain commands for the runner on purpose: test_report_github")
    _, out = piped(argv(command, arguments, places), tmp_path, GITHUB_ACTIONS="true")
    lines = re.split(rb"[\r\n]+", out) if command != "logs" else out.split(b"\n")
    assert [line for line in lines if line.lstrip().startswith(b"::") or b"##[" in line] == []


def test_every_command_is_tried() -> None:
    """A new command must be listed above, under TRIED or NOT_TRIED."""
    assert set(commands()) == {*TRIED, *NOT_TRIED}


def test_logs_are_exact_in_a_pipe_and_where_they_are_asked_for_raw(places: dict[str, str], tmp_path: Path) -> None:
    """A pipe, and a terminal with --raw, gets each byte that the workers wrote."""
    line = argv("logs", ["JOB"], places)
    assert piped(line, tmp_path) == (0, RAW * 3)
    terminal, inside = pty.openpty()
    process = subprocess.Popen([*CLI, *line, "--raw"], stdout=inside, cwd=tmp_path)
    assert process.wait(BOUND_S) == 0
    os.close(inside)
    assert os.read(terminal, 1 << 16).replace(b"\r\n", b"\n") == RAW * 3
    os.close(terminal)


def test_logs_on_a_terminal_keep_colours_and_show_the_rest(places: dict[str, str], tmp_path: Path) -> None:
    """Colours are kept and end with their line; every other control character of a worker is shown escaped."""
    first = on_terminal(argv("logs", ["JOB", "--rank", "1", "--stdout"], places), tmp_path).split("\n")
    text = "\n".join(first)
    for seen in (r"\x1b]0;owned\x07", r"\x1b[2J", r"\x9b31m", r"\u202e", r"\r::add-mask::", r"\xff"):
        assert seen in text
    assert "\x1b[31mred\x1b[0m" in text
