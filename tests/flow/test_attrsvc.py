"""`nvrx-slurm attrsvc` as a process of its own: what it answers, what it reads, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from nvrx_slurm.attribution.local_service import find_token
from nvrx_slurm.journal.verdicts import FailureKey, Inquiry
from nvrx_slurm.util.processes import is_alive
from tests.waiting import until

DEADLINE_S = 60.0
TOKEN = "correct-horse-battery-staple"
PROGRAM = (sys.executable, "-P", "-m", "nvrx_slurm", "attrsvc")
JSON = {"Content-Type": "application/json"}
CRASH = """\
2026-11-21 18:00:00,000 step 12 loss 2.31
Traceback (most recent call last):
  File "/home/u/train.py", line 40, in <module>
    import flash_attn_3
ModuleNotFoundError: No module named 'flash_attn_3'
"""


@dataclass
class Served:
    """A service that listens, and a client for it."""

    process: subprocess.Popen[str]
    client: httpx2.Client
    greeting: str

    def ask(self, inquiry: Inquiry, intent: str = "terminal", wait_s: int = 50) -> httpx2.Response:
        body = msgspec.json.encode({"inquiry": inquiry, "intent": intent})
        return self.client.post("/v1/inquiries", content=body, headers={**JSON, "Prefer": f"wait={wait_s}"})

    def stats(self) -> Any:
        return self.client.get("/v1/stats").json()

    def worker(self) -> int:
        """The process id of the only worker, once it has started."""
        return int(until(lambda: self.stats()["workers"][0]["pid"], "a worker to start"))

    def becomes(self, state: str) -> None:
        until(lambda: self.stats()["inquiries"][state] == 1, f"an inquiry to be {state}")


@dataclass
class Room:
    """A folder for one test: logs, state, and services that end with it."""

    path: Path
    stack: ExitStack

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def tokens(self) -> Path:
        """The folder in which a service without a configured token keeps the token that it made."""
        return self.path / "state-home/nvrx-slurm/attrsvc"

    def start(self, *options: str, token: str | None = None, verify: Any = True) -> Served:
        """A service with one worker. What it prints after its first line goes to `log`."""
        port_file = self.path / f"port-{len(list(self.path.iterdir()))}"
        argv = (*PROGRAM, "--bind", "127.0.0.1:0", "--root", str(self.logs), "--workers", "1")
        with (self.path / "log").open("a") as log:
            process = subprocess.Popen(
                [*argv, "--port-file", str(port_file), *options],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "XDG_STATE_HOME": str(self.path / "state-home")},
            )
        self.stack.callback(_end, process)
        assert process.stdout is not None
        greeting = process.stdout.readline()
        assert greeting, (self.path / "log").read_text()
        url = f"{'https' if '--tls-cert' in options else 'http'}://127.0.0.1:{port_file.read_text().strip()}"
        token = token or find_token(url, self.tokens)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        client = httpx2.Client(base_url=url, headers=headers, timeout=DEADLINE_S, verify=verify, trust_env=False)
        return Served(process, self.stack.enter_context(client), greeting)

    def inquiry(self, log: str, cycle: int = 0) -> Inquiry:
        folder = self.logs / f"cycle-{cycle}"
        folder.mkdir()
        (folder / "rank-0.err").write_text(log)
        key = FailureKey(job=str(self.path), generation=0, replica="main-0", cycle=cycle, rank=0)
        return Inquiry(key=key, paths=(str(folder),))


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    (tmp_path / "logs").mkdir()
    with ExitStack() as stack:
        yield Room(tmp_path, stack)


def _end(process: subprocess.Popen[str]) -> None:
    with process:
        process.kill()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop the process (SIGSTOP) for the duration of the `with` block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


REFUSALS = """
import json, os, sys
import nvrx_slurm.attribution.service.server
from nvrx_slurm.cli import main
for options in json.load(sys.stdin):
    out, err = (os.memfd_create(name) for name in ("stdout", "stderr"))
    if (child := os.fork()) == 0:
        os.dup2(out, 1), os.dup2(err, 2)
        sys.argv = ["nvrx-slurm", "attrsvc", *options]
        main()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([code, *(os.pread(file, 1 << 20, 0).decode() for file in (out, err))]), flush=True)
"""
"""Each call runs in a process of its own, forked from one that has imported all that a service needs."""


def refusals(*calls: tuple[str, ...]) -> list[str]:
    """The errors of calls that must not start a service. Each call exits with 2, without a traceback."""
    env = {name: value for name, value in os.environ.items() if name != "NVRX_SLURM_ATTRSVC_TOKEN"}
    argv, asked = [sys.executable, "-P", "-c", REFUSALS], msgspec.json.encode(calls).decode()
    done = subprocess.run(argv, input=asked, capture_output=True, text=True, timeout=DEADLINE_S, env=env)
    assert done.returncode == 0, done.stderr
    ends = [msgspec.json.decode(line, type=tuple[int, str, str]) for line in done.stdout.splitlines()]
    assert len(ends) == len(calls)
    for code, printed, said in ends:
        assert (code, printed) == (2, ""), said
        assert said.startswith("nvrx-slurm: error: ") and "Traceback" not in said
    return [said for *_, said in ends]


def test_attribution(room: Room) -> None:
    """A log below a root is analysed, and the answer names what ended the job. A symlink among the logs that leads
    out of the root is not followed."""
    served = room.start()
    answer = served.ask(room.inquiry(CRASH))
    assert answer.status_code == 200, answer.text
    attribution = answer.json()["attribution"]
    assert (attribution["source"], attribution["verdict"]) == ("attrsvc", "STOP")
    assert "flash_attn_3" in attribution["primary"]["text"]
    url = str(served.client.base_url).rstrip("/")
    start, _, where = served.greeting.partition(", which your own tools find in ")
    assert start == f"nvrx-slurm attrsvc: {url}: reads below {room.logs}; bearer token required"
    assert Path(where.strip()).parent == room.tokens

    secret = room.path / "secret"
    secret.write_text(CRASH)
    inquiry = room.inquiry("nothing to see\n", cycle=1)
    (Path(inquiry.paths[0]) / "rank-1.err").symlink_to(secret)
    answer = served.ask(inquiry)
    assert answer.json()["state"] in ("done", "failed") and "flash_attn_3" not in answer.text


def test_killed(room: Room) -> None:
    """A killed service leaves no process. The next service on its state folder finishes the inquiry that was running,
    and has the answer of the finished one."""
    state = ("--state-dir", str(room.path / "state"))
    first = room.start(*state)
    known = first.ask(room.inquiry(CRASH)).json()
    worker, held = first.worker(), room.inquiry(CRASH, cycle=1)
    with stopped(worker):
        assert first.ask(held, wait_s=0).status_code == 202
        first.becomes("running")
        first.process.kill()
        until(lambda: not is_alive(worker), "the worker's end")
    second = room.start(*state)
    assert second.client.get(f"/v1/inquiries/{known['id']}").json() == known
    assert second.ask(held).json()["attribution"]["verdict"] == "STOP"


def test_drains(room: Room) -> None:
    """After SIGTERM the service finishes and answers running inquiries, refuses new ones, and exits with 0."""
    served = room.start()
    held = room.inquiry(CRASH)
    served.ask(room.inquiry(CRASH, cycle=1))
    with stopped(served.worker()):
        served.ask(held, wait_s=0)
        served.becomes("running")
        served.process.send_signal(signal.SIGTERM)
        until(lambda: served.client.get("/healthz").status_code == 503, "a service that drains")
        refused = served.ask(room.inquiry(CRASH, cycle=2))
        assert refused.status_code == 503 and refused.headers["Retry-After"]
        path = f"/v1/inquiries/{served.ask(held, wait_s=0).json()['id']}?wait=50"
        worker, url = served.worker(), served.client.base_url
        with closing(HTTPConnection(url.host, url.port, DEADLINE_S)) as waiting:
            said = {"Authorization": served.client.headers["Authorization"]}
            waiting.request(
                "GET", path, headers=said
            )  # connected before the work is done: after that the service no longer listens
            os.kill(worker, signal.SIGCONT)
            assert msgspec.json.decode(waiting.getresponse().read())["state"] == "done"
    assert served.process.wait(DEADLINE_S) == 0


def test_interrupted_twice(room: Room) -> None:
    """A second Ctrl-C ends the service and its worker at once, even while an inquiry runs."""
    served = room.start("--drain", "1h")
    served.ask(room.inquiry(CRASH))
    worker = served.worker()
    with stopped(worker):
        served.ask(room.inquiry(CRASH, cycle=1), wait_s=0)
        served.becomes("running")
        served.process.send_signal(signal.SIGINT)
        until(lambda: served.client.get("/healthz").status_code == 503, "a service that drains")
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(DEADLINE_S) == 130
        until(lambda: not is_alive(worker), "the worker's end")


def test_managed(room: Room) -> None:
    """A managed service ends with the process that started it, even where that process is killed."""
    port_file = room.path / "port"
    options = ("--bind", "127.0.0.1:0", "--root", str(room.logs), "--port-file", str(port_file), "--managed")
    argv = [*PROGRAM, *options]
    start = f"import subprocess; child = subprocess.Popen({argv!r}); print(child.pid, flush=True); child.wait()"
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        service = int(parent.stdout.readline())
        until(port_file.exists, "a service that listens")
        parent.kill()
        until(lambda: not is_alive(service), "the service's end")


def test_tls_and_token(room: Room) -> None:
    """With a certificate the service uses HTTPS. A token from a file is in no log and on no command line."""
    certificate, key, token = room.path / "cert.pem", room.path / "key.pem", room.path / "token"
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=127.0.0.1"
    argv = [*made.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(argv, check=True, capture_output=True, timeout=DEADLINE_S)
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    trusted = ssl.create_default_context(cafile=str(certificate))
    options = ("--tls-cert", str(certificate), "--tls-key", str(key), "--token-file", str(token))
    served = room.start(*options, token=TOKEN, verify=trusted)
    assert served.ask(room.inquiry(CRASH)).status_code == 200
    wrong = {"Authorization": f"Bearer {TOKEN}s"}
    assert served.client.get("/v1/stats", headers=wrong).status_code == 401
    assert "bearer token required" in served.greeting and served.greeting.startswith("nvrx-slurm attrsvc: https://")
    command_line = Path(f"/proc/{served.process.pid}/cmdline").read_text()
    assert TOKEN not in command_line + served.greeting + (room.path / "log").read_text()


def test_refusals(room: Room) -> None:
    """A service with a wrong option says why in one line and exits with 2."""
    here, logs, token = ("--bind", "127.0.0.1:0"), ("--root", str(room.logs)), room.path / "token"
    token.write_text(TOKEN)
    token.chmod(0o644)
    (room.path / "rules.yaml").write_text("what: [")
    cases = {
        (*here, "--root", str(room.path / "none")): "no such folder",
        (*here, *logs, "--token-file", str(token)): "can be read by others (mode 0644)",
        ("--bind", "0.0.0.0:0", *logs): "a token is needed",
        ("--bind", "127.0.0.1", *logs): "HOST:PORT",
        (*here, *logs, "--tls-cert", str(token)): "go together",
        (*here, *logs, "--tls-cert", str(token), "--tls-key", str(token)): "--tls-cert",
        (*here, *logs, "--port-file", str(room.path / "none/port")): "--port-file",
        (*here, *logs, "--rules", str(room.path / "rules.yaml")): "rules.yaml",
        (*here, *logs, "--timeout", "soon"): "--timeout soon",
    }
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        cases["--bind", address, *logs] = "Address already in use; name another port"
        for why, said in zip(cases.values(), refusals(*cases), strict=True):
            assert why in said


def test_without_the_extra(room: Room) -> None:
    """Where the packages of the extra are not installed, the command exits with 2 and says how to install them."""
    block = "import sys; sys.modules['uvicorn'] = None; from nvrx_slurm.cli import main; main()"
    argv = [sys.executable, "-P", "-c", block, "attrsvc", "--root", str(room.logs)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2 and "pip install 'nvrx-slurm[attribution]'" in done.stderr


def test_schemathesis(room: Room) -> None:
    """The OpenAPI document is correct: a fuzzer that knows only the document finds no answer that contradicts it."""
    token = room.path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    served = room.start("--token-file", str(token), "--rate", "100000", "--longest-wait", "1s", token=TOKEN)
    program = Path(sys.executable).with_name("schemathesis")
    argv = [program, "run", f"{served.client.base_url}/openapi.json", "--header", f"Authorization: Bearer {TOKEN}"]
    bounds = ["--checks", "all", "--seed", "1", "--max-time", "20", "--no-color"]
    done = subprocess.run([*argv, *bounds], cwd=room.path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
    assert served.client.get("/healthz").json() == {"status": "ok"}
