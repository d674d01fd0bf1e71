"""`nvrx-slurm mcp`, as an assistant's program uses it: a process, the official client, standard input and output."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from nvrx_slurm.journal.verdicts import Attribution, FailureKey, Inquiry, Verdict
from tests.harness import Gate, RunningJob, gate_plan

if TYPE_CHECKING:
    from mcp.client.session import ClientSession

TOOLS = ["analyze_paths", "attribute", "explain_job", "explain_rule", "list_rules"]
OWN_RULE = """
warp_core.breach:
  fault: warp_core_breach
  pattern: 'warp core breach'
  verdict: STOP
  scope: user_code
  severity: 74
  hint: Eject it.
  reference: https://example.org/warp
  sample: ['main: warp core breach imminent']
  not_sample: ['warp core nominal']
"""

INQUIRY = {"key": {"job": "j", "generation": 0, "replica": "main-0", "cycle": 0}, "paths": ["/nowhere"]}

Connect = Callable[..., "AbstractAsyncContextManager[ClientSession]"]


@asynccontextmanager
async def connect(*options: object) -> AsyncIterator[ClientSession]:
    """A session with a server that has initialised."""
    from mcp import ClientSession, StdioServerParameters, stdio_client  # 1.5 s, which collection would pay

    arguments = ["-P", "-m", "nvrx_slurm", "mcp", *map(str, options)]
    async with (
        stdio_client(StdioServerParameters(command=sys.executable, args=arguments)) as streams,
        ClientSession(*streams, read_timeout_seconds=60.0) as session,
    ):
        await session.initialize()
        yield session


async def call(session: ClientSession, tool: str, **arguments: Any) -> Any:
    """The tool's answer, or its error message where it failed."""
    result = await session.call_tool(tool, arguments)
    return result.content[0].text if result.is_error else result.structured_content  # type: ignore[union-attr]


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A folder with the log of a worker whose failure a restart would repeat."""
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "rank-1.err").write_text(
        "Traceback (most recent call last):\n"
        '  File "/w/train.py", line 12, in main\n'
        "ModuleNotFoundError: No module named 'foo'\n"
    )
    return folder


async def test_an_assistant_gets_from_a_log_to_its_rule(logs: Path) -> None:
    """The tools are listed with their parameters. One names what failed, another explains the rule that found it."""
    async with connect("--root", logs) as session:
        tools = {tool.name: tool for tool in (await session.list_tools()).tools}
        assert sorted(tools) == TOOLS
        assert all(tool.description and tool.input_schema["properties"] for tool in tools.values())
        found = msgspec.convert(await call(session, "analyze_paths", paths=[str(logs)]), Attribution)
        assert (found.verdict, found.ranks) == (Verdict.STOP, (1,))
        assert found.primary is not None and "No module named 'foo'" in found.primary.text
        rule = await call(session, "explain_rule", name=found.primary.rule)
        assert (rule["fault"], rule["hint"]) == (found.fault, found.hint)
        listed = await call(session, "list_rules", fault=found.fault)
        assert found.primary.rule in [one["name"] for one in listed["rules"]]


async def test_an_inquiry_is_answered_under_its_key(logs: Path) -> None:
    """`attribute` answers as the service does, so that either can be a source."""
    key = FailureKey(job="/jobs/1", generation=0, replica="main-0", cycle=2, rank=1)
    inquiry = Inquiry(key=key, paths=(str(logs),), pids={1: 4711})
    async with connect() as session:
        answer = await call(session, "attribute", inquiry=msgspec.to_builtins(inquiry, str_keys=True), settled=True)
    assert (answer["key"], answer["state"]) == (str(key), "done")
    assert answer["attribution"]["verdict"] == "STOP"


async def test_only_what_lies_below_the_roots_is_read(logs: Path, tmp_path: Path) -> None:
    """A path elsewhere, a path with `..` and a link that leads out of the roots are refused. Such a link below a
    folder is left out."""
    secret = tmp_path / "secret.log"
    secret.write_text("RuntimeError: s3cret\n")
    inside = logs / "inside"
    inside.mkdir()
    (inside / "link.log").symlink_to(secret)
    asked = [secret, logs / ".." / "secret.log", inside / "link.log", "/etc"]
    async with connect("--root", logs) as session:
        for path in asked:
            refusal = await call(session, "analyze_paths", paths=[str(path)])
            assert f"does not lie below an allowed root ({logs})" in refusal
            assert "s3cret" not in refusal
        # As in the service: such a link below a folder is left out, and the answer says so.
        found = await call(session, "analyze_paths", paths=[str(logs)])
        assert found["fault"] == "import_error"
        assert found["read"]["problems"] == [f"{inside / 'link.log'} does not lie below an allowed root"]


async def test_a_mistake_is_one_sentence(logs: Path) -> None:
    """Each wrong call gets one sentence that names what is wrong, and the session goes on."""
    mistakes = {
        "no rule 'nope'": ("explain_rule", {"name": "nope"}),
        "no rule is of the fault 'nope'; there are": ("list_rules", {"fault": "nope"}),
        "inquiry: Object missing required field `key`": ("attribute", {"inquiry": {}}),
        "'../../etc' is no job id": ("explain_job", {"job": "../../etc"}),
        "holds no jobs": ("explain_job", {"job": "17"}),
        "nowhere": ("analyze_paths", {"paths": [str(logs / "nowhere")]}),
        "analyze_paths: paths: Input should be a valid list": ("analyze_paths", {"paths": "a.log"}),
        "explain_rule: name: Field required": ("explain_rule", {}),
        "262144 at most": ("attribute", {"inquiry": {**INQUIRY, "workers_per_node": 10**15}}),
    }
    async with connect("--folder", logs / "jobs") as session:
        for sentence, (tool, arguments) in mistakes.items():
            said = await call(session, tool, **arguments)
            assert sentence in said
            assert "Traceback" not in said
            assert len(said.splitlines()) == 1


async def test_unknown_keys_are_named(logs: Path) -> None:
    """Unknown keys of an inquiry are ignored and listed in the answer, so that two versions can work together."""
    async with connect() as session:
        said = await call(session, "attribute", inquiry={**INQUIRY, "paths": [str(logs)], "setled": True})
        assert said["ignored"] == ["setled"]


async def test_own_rules_are_known_too(logs: Path, tmp_path: Path) -> None:
    """A file of the user's rules is part of the catalogue, and of what the analysis recognises."""
    (tmp_path / "mine.yaml").write_text(OWN_RULE)
    (logs / "rank-1.err").write_text("main: warp core breach imminent\n")
    async with connect("--rules", tmp_path / "mine.yaml") as session:
        assert (await call(session, "explain_rule", name="warp_core.breach"))["hint"] == "Eject it."
        found = await call(session, "analyze_paths", paths=[str(logs)])
        assert found["fault"] == "warp_core_breach"


async def test_a_job_is_explained(gate: Gate, run_local: Callable[..., RunningJob], tmp_path: Path) -> None:
    """`explain_job` shows how a job ended, and of its failure the rank, the decision and who made it."""
    job = run_local(gate_plan(gate, tmp_path, nodes=1, spares=0, workers=1, max_restarts=0))
    gate.wait(1, cycle=0)[0].go(7)
    assert job.finish() == 1
    async with connect("--folder", job.folder.path.parent) as session:
        told = await call(session, "explain_job", job=job.folder.job_id)
    assert told["status"]["exit_code"] == 1
    (failure,) = told["failures"]
    assert failure["inquiry"]["failed"]["exit_code"] == 7
    assert (failure["decided"]["action"], failure["decided"]["by"]) == ("stop", "budget")
