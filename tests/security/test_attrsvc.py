"""The attribution service reads logs with its user's rights, so only that user's own tools may use it."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 -- bob can load nothing any more when a socket asks for it
import http.client
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from nvrx_slurm.attribution.http_client import HttpClient
from nvrx_slurm.attribution.local_service import announced, find_token
from nvrx_slurm.attribution.sources.service import fixed_endpoint
from nvrx_slurm.errors import SourceError, UsageError
from nvrx_slurm.jobspec import env
from nvrx_slurm.util.processes import MOST_DESCRIPTORS
from tests.waiting import until

BOUND_S = 60.0
Start = Callable[..., "Service"]


class Service:
    """Alice's `nvrx-slurm attrsvc`, on a free port of loopback."""

    def __init__(self, root: Path, state: Path, *options: str) -> None:
        self.log = root / "attrsvc.log"
        argv = [sys.executable, "-m", "nvrx_slurm", "attrsvc", "--bind", "127.0.0.1:0", "--workers", "1"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*argv, "--root", str(root), *options],
                env=env.child_environment({"XDG_STATE_HOME": str(state)}, without=[env.ATTRSVC_TOKEN]),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        self.greeting = self.process.stdout.readline()
        if not self.greeting:
            self.process.stdout.close()
            self.process.wait(BOUND_S)
            raise AssertionError(self.log.read_text())
        self.port = int(self.greeting.split("127.0.0.1:")[1].split(":")[0])
        self.url = f"http://127.0.0.1:{self.port}"

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(BOUND_S)


@pytest.fixture
def state(common: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Alice's state folder, in which her tools find her service. Bob can enter it, as he can enter her home."""
    monkeypatch.setenv("XDG_STATE_HOME", str(common / "state"))
    monkeypatch.delenv(env.ATTRSVC_TOKEN, raising=False)
    (common / "state").mkdir()
    return common / "state"


@pytest.fixture
def start(common: Path, state: Path) -> Iterator[Start]:
    """Starts services, which end with the test."""
    with contextlib.ExitStack() as stack:

        def service(*options: str) -> Service:
            started = Service(common, state, *options)
            stack.enter_context(started.process)
            stack.callback(started.process.kill)
            return started

        yield service


def statuses(port: int, token: str | None) -> list[int]:
    """The status of the response to each kind of request."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    found = []
    for method, path in (
        ("GET", "/v1/stats"),
        ("GET", "/v1/inquiries"),
        ("POST", "/v1/inquiries"),
        ("GET", "/metrics"),
    ):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request(method, path, headers=headers)
        found.append(connection.getresponse().status)
        connection.close()
    return found


def files_below(folder: str) -> list[str]:
    """The files below a folder that the calling user can read."""
    paths = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return [str(path) for path in paths if os.access(path, os.R_OK)]


def test_another_user_of_the_machine_is_refused(bob: Any, start: Start, state: Path) -> None:
    """Without the token bob gets 401 from every path, and he cannot read the token's file. Alice's tools find it."""
    service = start()
    assert bob.run(statuses, service.port, None) == [401] * 4
    assert bob.run(statuses, service.port, "guess-guess-guess") == [401] * 4
    assert bob.run(files_below, str(state)) == []
    endpoint = fixed_endpoint(service.url, None)()
    assert endpoint.token is not None and endpoint.token not in service.greeting
    assert statuses(service.port, endpoint.token) == [200, 200, 415, 200]
    assert find_token(f"http://localhost:{service.port}/") == endpoint.token


def test_the_token_is_valid_as_long_as_its_service_runs(start: Start, state: Path) -> None:
    """An orderly end removes the token's file. After SIGKILL the file stays, but is not used: the port may be bob's
    by then."""
    ended, killed = start(), start()
    assert find_token(ended.url) and find_token(killed.url)
    assert ended.end() == 0
    killed.end(signal.SIGKILL)
    assert [str(killed.port) in path.name for path in (state / "nvrx-slurm/attrsvc").iterdir()] == [True]
    assert (find_token(ended.url), find_token(killed.url)) == (None, None)


def test_it_is_open_to_all_only_with_no_token(bob: Any, start: Start) -> None:
    """With --no-token every user may ask, and the service's first line says so."""
    service = start("--no-token")
    assert "no token: every user of this machine may ask" in service.greeting
    assert bob.run(statuses, service.port, None) == [200, 200, 415, 200]


def test_a_folder_that_others_can_enter_holds_no_token(start: Start, state: Path) -> None:
    """The error names the folder and the fix."""
    folder = state / "nvrx-slurm/attrsvc"
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    with pytest.raises(UsageError, match=f"chmod 700 {folder}"), announced("127.0.0.1", 1, "x"):
        pass
    with pytest.raises(AssertionError, match=r"chmod 700 .* or name a token with --token-file"):
        start()


def test_a_token_file_of_another_user_is_not_used(common: Path) -> None:
    """Where other users can write to the folder after all, their files are not read as tokens."""
    if os.geteuid():
        pytest.skip("only root can give a file away")
    with announced("127.0.0.1", 7, "planted", common / "tokens") as path:
        assert find_token("http://127.0.0.1:7", common / "tokens") == "planted"
        os.chown(path, 65534, -1)
        assert find_token("http://127.0.0.1:7", common / "tokens") is None


def answer_stop(address: str) -> None:
    """Listen in place of a service, and print what the first client sends."""
    is_ipv6 = ":" in address
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    with socket.create_server((address, 0), family=family, dualstack_ipv6=is_ipv6) as listener:
        print(listener.getsockname()[1], flush=True)
        client, _ = listener.accept()
        print(client.recv(65536).decode().replace("\r\n", " | "), flush=True)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::", "::ffff:127.0.0.1", "::ffff:0.0.0.0"])
async def test_a_port_that_another_user_has_taken_gets_no_token_and_is_not_asked(bob: Any, address: str) -> None:
    """Bob listens on the port of a service of alice's that has ended. Her job's source sends him nothing, and its
    error names his uid."""
    attack = bob.start(answer_stop, address)
    url = f"http://127.0.0.1:{attack.line()}"
    http = HttpClient(proxies=False, own_listener=True)
    try:
        with pytest.raises(SourceError, match=f"belongs to uid {bob.uid}, and is not asked"):
            headers = {"Authorization": "Bearer alice's"}
            await http.send("GET", f"{url}/v1/stats", headers=headers, connect_s=10.0, read_s=10.0)
    finally:
        await http.close()
    with socket.create_connection(("127.0.0.1", urlsplit(url).port or 0)) as link:
        link.sendall(b"the first one")
        assert attack.line() == "the first one"


async def test_a_service_of_ones_own_is_asked(start: Start) -> None:
    """The check of the listener's user accepts alice's own service."""
    http = HttpClient(proxies=False, own_listener=True)
    try:
        endpoint = fixed_endpoint(start().url, None)()
        reply = await http.send("GET", f"{endpoint.url}/healthz", connect_s=10.0, read_s=10.0)
    finally:
        await http.close()
    assert reply.status == 200


def hold_open(port: int, count: int) -> str:
    """Open connections, send nothing on them, and wait to be ended."""
    opened = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    print(f"{len(opened)} are open", flush=True)
    threading.Event().wait()
    return ""


def flood(port: int, count: int) -> int:
    """Send requests with a wrong token; returns how many were answered with 401."""
    return sum(statuses(port, "wrong-wrong-wrong").count(401) for _ in range(count))


def open_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_silent_connections_cost_nothing(bob: Any, start: Start) -> None:
    """Bob opens 900 connections. The service keeps at most 64 of them, closes those too after a while, answers alice,
    and logs it once."""
    service = start()
    before = open_descriptors(service.process.pid)
    token = find_token(service.url)
    attack = bob.start(hold_open, service.port, 900)
    assert attack.line() == "900 are open"
    assert statuses(service.port, token) == [200, 200, 415, 200]
    assert open_descriptors(service.process.pid) <= before + 64 + 4
    until(lambda: open_descriptors(service.process.pid) <= before + 4, "a service that has closed all of them")
    said = service.log.read_text()
    assert "Traceback" not in said
    assert said.count("more than 64 connections without a token") == 1
    soft, hard = resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)
    assert soft == min(hard, MOST_DESCRIPTORS)


def test_refused_requests_fill_no_log_and_use_up_no_rate(bob: Any, start: Start) -> None:
    """Alice has a rate limit of her own although bob uses the same address, and his 40 refusals are one line of the
    log."""
    service = start("--rate", "1")
    token = find_token(service.url)
    assert 0 < bob.run(flood, service.port, 10) <= 40
    assert statuses(service.port, token) == [200, 200, 415, 200]
    refused = [line for line in service.log.read_text().splitlines() if " 401 " in line or " 429 " in line]
    assert len(refused) == 1
