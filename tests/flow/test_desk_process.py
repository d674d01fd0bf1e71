"""The attribution broker's process, through its pipes: any input to it, and any end of it or of its controller."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nvrx_slurm.agent.supervisor import descendants
from nvrx_slurm.jobspec.model import AttributionSpec, DataflowSpec
from nvrx_slurm.journal.verdicts import FailureKey, Inquiry
from nvrx_slurm.lab.faults.attribution_server import AttributionServer, behaviour
from nvrx_slurm.lab.plans import plan_json
from tests.harness import wait_gone
from tests.waiting import until

WAIT_S = 60.0
DESK = (sys.executable, "-P", "-m", "nvrx_slurm.attribution")
SCRIPT = (sys.executable, "-S", "-P", str(Path(__file__).parents[1] / "mcp_script.py"))


class Desk:
    """A broker process, and the lines that it has written."""

    def __init__(self, folder: Path, plan: AttributionSpec) -> None:
        self.folder = folder
        plan_bytes = plan_json(attribution=plan)
        (folder / "plan.json").write_bytes(plan_bytes)
        self.log = (folder / "desk.log").open("wb")
        self.process = subprocess.Popen(
            DESK,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env={**os.environ, "NVRX_JOB_FOLDER": str(folder)},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self._rest = b""

    def say(self, *messages: dict[str, Any] | bytes) -> None:
        for message in messages:
            self.stdin.write(message if isinstance(message, bytes) else msgspec.json.encode(message))
            self.stdin.write(b"\n")
        self.stdin.flush()

    def ask(self, cycle: int = 0, *, settled: bool = True) -> None:
        inquiry = Inquiry(key=self.key(cycle), paths=(str(self.folder / "logs"),))
        self.say({"ask": inquiry, "settled": settled})

    def key(self, cycle: int = 0) -> FailureKey:
        return FailureKey(job=str(self.folder), generation=0, replica="main-0", cycle=cycle, rank=1)

    def answers(self, count: int) -> list[dict[str, Any]]:
        """The next `count` answers; waits for them."""
        deadline, lines = time.monotonic() + WAIT_S, self._rest.split(b"\n")
        while len(lines) <= count:
            ready, _, _ = select.select([self.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self.stdout.fileno(), 1 << 20) if ready else b""
            assert data, f"{len(lines) - 1} of {count} answers came\n{self.said()}"
            self._rest += data
            lines = self._rest.split(b"\n")
        self._rest = b"\n".join(lines[count:])
        return [json.loads(line)["answer"] for line in lines[:count]]

    def said(self) -> str:
        """The broker's log."""
        return (self.folder / "desk.log").read_text()

    def finish(self) -> int:
        """Close the broker's input, and wait for its exit code."""
        self.stdin.close()
        return self.process.wait(WAIT_S)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for file in (self.stdin, self.stdout, self.log):
            file.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    """Starts brokers with these settings in their plan."""
    desks: list[Desk] = []

    def start(**plan: Any) -> Desk:
        desks.append(Desk(tmp_path, AttributionSpec(**{"enable_lib": False, **plan})))
        return desks[-1]

    yield start
    for desk in desks:
        desk.end()


@pytest.fixture
def serve() -> Iterator[Callable[[str], AttributionServer]]:
    """Starts attribution services with the named behaviour."""
    servers: list[AttributionServer] = []

    def serve(name: str) -> AttributionServer:
        servers.append(AttributionServer(behaviour(name)))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


@pytest.fixture
def server(serve: Callable[[str], AttributionServer]) -> AttributionServer:
    """A service that answers STOP at once."""
    return serve("stop")


def verdicts(answers: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return sorted((answer["attribution"]["source"], answer["attribution"]["verdict"]) for answer in answers)


def test_each_source_answers_through_the_pipe(start, server, tmp_path) -> None:
    """The built-in rules and the service give one answer each. At the end of its input the broker exits with 0."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.err").write_text("ModuleNotFoundError: No module named 'foo'\n")
    desk = start(enable_lib=True, attrsvc_url=server.url)
    desk.ask()
    assert verdicts(desk.answers(2)) == [("attrsvc", "STOP"), ("lib", "STOP")]
    assert desk.finish() == 0


def test_garbage_is_skipped(start, server) -> None:
    """Lines that are no messages for the broker are logged, and the next message is processed."""
    desk = start(attrsvc_url=server.url)
    desk.say(b"garbage", b"", b"[]", b"\xff\xfe")
    desk.say(b'{"ask": 3}', b'{"settled": {"job": 1}}', b'{"judged": {"key": 1}}')
    desk.say({"tomorrow": "a word of a later version"})
    desk.ask()
    assert verdicts(desk.answers(1)) == [("attrsvc", "STOP")]
    assert desk.finish() == 0
    assert desk.said().count("not a line for the broker") == 7


def test_a_line_without_end_is_skipped(start, server) -> None:
    """A line beyond the limit is skipped, and the next message is processed."""
    desk = start(attrsvc_url=server.url)
    desk.say(b"x" * (17 << 20))
    desk.ask()
    assert verdicts(desk.answers(1)) == [("attrsvc", "STOP")]


def test_two_failures_at_once(start, serve) -> None:
    """A failure whose logs are not whole yet does not delay the answer for another one. A stale `settled` has no
    effect."""
    desk = start(attrsvc_url=serve("changes").url, decision_timeout=WAIT_S)
    desk.ask(0, settled=False)
    desk.ask(1, settled=True)
    (second,) = desk.answers(1)
    assert second["key"]["cycle"] == 1
    desk.say({"settled": desk.key(9)}, {"settled": desk.key(1)}, {"settled": desk.key(0)})
    (first,) = desk.answers(1)
    assert (first["key"]["cycle"], first["attribution"]["verdict"]) == (0, "STOP")


def test_a_thousand_asks(start, server) -> None:
    """Each request is answered once, and the service is asked once about each of a hundred keys."""
    desk = start(attrsvc_url=server.url)
    for number in range(1000):
        desk.ask(number % 100)
    found = desk.answers(1000)
    assert verdicts(found) == [("attrsvc", "STOP")] * 1000
    assert sorted(answer["key"]["cycle"] for answer in found) == sorted(number % 100 for number in range(1000))
    assert len(server.asked) == 100
    assert desk.finish() == 0


def test_a_source_that_hangs_is_a_timeout_beside_the_others(start, serve, server) -> None:
    """Of two sources one hangs: the answer of the other comes at once, and the TIMEOUT of the first after its
    timeout."""
    hanging = serve("hang")
    desk = start(attrsvc_url=server.url, http_urls=(hanging.url,), timeout=8.0)
    desk.ask()
    assert verdicts(desk.answers(1)) == [("attrsvc", "STOP")]
    assert verdicts(desk.answers(1)) == [(hanging.url, "TIMEOUT")]


def test_the_end_of_input_is_not_held_up(start, serve) -> None:
    """When the controller closes the broker's input while a source hangs, each request is answered, and the broker
    exits with 0."""
    desk = start(attrsvc_url=serve("hang").url)
    desk.ask()
    desk.stdin.close()
    (answer,) = desk.answers(1)
    assert answer["attribution"]["verdict"] == "UNKNOWN"
    assert "controller went away" in answer["attribution"]["problem"]
    assert desk.process.wait(WAIT_S) == 0


def test_a_decision_is_kept_in_the_spool(start, server, tmp_path) -> None:
    """Where the receiver is unreachable until the broker ends, the decision stays in the spool."""
    desk = start(attrsvc_url=server.url, dataflow=DataflowSpec(url="http://127.0.0.1:1", index="failures"))
    desk.ask()
    desk.say({"judged": {"key": desk.key(), "verdict": "STOP", "acted": True, "why": "", "action": "shut_down"}})
    desk.answers(1)
    assert desk.finish() == 0
    spooled = b"".join(path.read_bytes() for path in (tmp_path / "spool").rglob("*") if path.is_file())
    assert b"scripted" in spooled and b"shut_down" in spooled


def test_a_controller_that_reads_no_more(start, server) -> None:
    """When the controller closes its end of the answers, the broker reads to the end of its input and exits with
    0."""
    desk = start(attrsvc_url=server.url)
    desk.stdout.close()
    for cycle in range(50):
        desk.ask(cycle)
    assert desk.finish() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_at_once_with_all_it_started(start, number) -> None:
    """A broker that is killed during a request leaves neither the analysis nor an MCP server behind."""
    desk = start(enable_lib=True, enable_mcp=True, mcp_command=(*SCRIPT, "silent"))
    desk.ask()
    children = _children(desk.process.pid, 2)
    desk.process.send_signal(number)
    assert desk.process.wait(WAIT_S) == -number
    wait_gone(children)


def test_it_is_ready_before_it_is_asked(start) -> None:
    """The MCP server is started together with the broker, so that the first failure need not wait for it."""
    desk = start(enable_mcp=True, mcp_command=(*SCRIPT, "stop"))
    children = _children(desk.process.pid, 1)
    desk.ask()
    assert verdicts(desk.answers(1)) == [("mcp", "STOP")]
    assert descendants(desk.process.pid) == children


def test_ctrl_c_does_not_end_the_broker(start, server) -> None:
    """The broker ignores SIGINT, which a terminal sends to every process: the controller acts on it."""
    desk = start(attrsvc_url=server.url)
    desk.ask(0)
    desk.answers(1)
    desk.process.send_signal(signal.SIGINT)
    desk.ask(1)
    assert verdicts(desk.answers(1)) == [("attrsvc", "STOP")]


def test_it_dies_with_its_controller(tmp_path) -> None:
    """The parent is killed while a request is open: the broker and its MCP server end, although the broker's input
    stays open."""
    plan = AttributionSpec(enable_mcp=True, mcp_command=(*SCRIPT, "silent"), enable_lib=False)
    (tmp_path / "plan.json").write_bytes(plan_json(attribution=plan))
    reading, writing = os.pipe()
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess; subprocess.run({DESK!r}, stdin={reading})"],
        pass_fds=[reading],
        env={**os.environ, "NVRX_JOB_FOLDER": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    family = _children(parent.pid, 2)  # the broker, and its MCP server
    parent.kill()
    parent.wait()
    wait_gone(family)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("content", [None, "{", '{"fault_tolerance": {"attribution": {"timeout_s": "soon"}}}'])
def test_without_a_plan_it_says_so(tmp_path, content) -> None:
    """Without a plan that can be read, the broker prints one message that names the file, and exits with 2."""
    if content is not None:
        (tmp_path / "plan.json").write_text(content)
    done = subprocess.run(
        DESK, env={**os.environ, "NVRX_JOB_FOLDER": str(tmp_path)}, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 2
    assert f"error: {tmp_path}/plan.json does not say" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_starts_light() -> None:
    """At its start the broker imports no HTTP client, no MCP SDK and no rules."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import nvrx_slurm.attribution.__main__, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert not {name.partition(".")[0] for name in loaded} & {
        "httpx2",
        "mcp",
        "pydantic",
        "redis",
        "ruamel",
        "stamina",
    }
    assert not {"nvrx_slurm.journal.records", "nvrx_slurm.attribution.analyze.analyzer"} & loaded


def _children(pid: int, count: int) -> list[int]:
    """The descendants of the process, once there are at least `count`."""
    return until(lambda: len(found := descendants(pid)) >= count and found, f"{count} children of {pid}") or []
