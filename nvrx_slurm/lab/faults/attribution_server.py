"""A real attribution service that behaves as a test or a flow says: in a thread, or as a process (`python -m`)."""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from nvrx_slurm.journal.verdicts import Attribution, Evidence, Inquiry, Scope, Verdict
from nvrx_slurm.util.durations import parse_duration

HUGE_BYTES = 2 << 20
STATES = {202: "running", 200: "done"}


class Asked(NamedTuple):
    """One request: what the service saw of it. `intent` is that of the inquiry's last submission."""

    method: str
    path: str
    headers: dict[str, str]
    inquiry: Inquiry
    intent: str
    settled: bool
    since: float  # when this inquiry was submitted first
    times: int  # how many requests about it came before


class PlannedResponse(NamedTuple):
    """`body` goes out as it is; with `cut`, the connection ends after half of it."""

    status: int
    body: bytes
    headers: Mapping[str, str] = MappingProxyType({})
    cut: bool = False


# What the service does with a request; None: it never answers.
Behaviour = Callable[[Asked, "AttributionServer"], PlannedResponse | None]


def attribution(inquiry: Inquiry, verdict: Verdict = Verdict.STOP, **fields: Any) -> Attribution:
    """A plausible answer: the failing rank's own words."""
    file = inquiry.paths[0] if inquiry.paths else "rank-0.err"
    line = Evidence(file=file, line=7, text="AssertionError: scripted", rule="scripted", rank=inquiry.key.rank)
    given = {"confidence": 0.9, "fault": "assertion", "scope": Scope.USER_CODE, "primary": line, **fields}
    return Attribution(source="lib", verdict=verdict, **given)


def answer(asked: Asked, status: int, said: Attribution | None, *, key: str = "", **fields: Any) -> PlannedResponse:
    body = {"key": key or str(asked.inquiry.key), "state": STATES[status], "attribution": said, **fields}
    return PlannedResponse(status, msgspec.json.encode(body))


def says(verdict: Verdict) -> Behaviour:
    """At once, and for good."""
    return lambda asked, server: answer(asked, 200, attribution(asked.inquiry, verdict))


def slow(seconds: float, verdict: Verdict) -> Behaviour:
    """So long after it was asked first; until then it holds each request back for as long as that asks."""

    def behave(asked: Asked, server: AttributionServer) -> PlannedResponse:
        left_s = asked.since + seconds - time.monotonic()
        # How long the asker lets a request be held back, as the header or the query says.
        wait = asked.headers.get("prefer", "").partition("wait=")[2] or asked.path.partition("wait=")[2]
        server.over.wait(min(max(0.0, left_s), float(wait.split("&")[0] or 0)))
        if time.monotonic() < asked.since + seconds:
            return answer(asked, 202, None)
        return answer(asked, 200, attribution(asked.inquiry, verdict))

    return behave


def changes_its_mind(asked: Asked, server: AttributionServer) -> PlannedResponse:
    """RESTART while the logs are written, on another rank's words; STOP once it is asked for good."""
    if asked.intent != "terminal":
        early = attribution(asked.inquiry, Verdict.RESTART, primary=Evidence(file="f", line=1, text="peer", rank=99))
        return answer(asked, 202, early, revision=1)
    return answer(asked, 200, attribution(asked.inquiry, Verdict.STOP))


def forgets(asked: Asked, server: AttributionServer) -> PlannedResponse:
    """It was restarted between submission and poll, and knows nothing; the second submission is answered."""
    if asked.method == "GET":
        return PlannedResponse(404, b'{"error": "no such inquiry"}')
    return answer(asked, 202, None) if asked.times == 0 else answer(asked, 200, attribution(asked.inquiry))


def flaps(asked: Asked, server: AttributionServer) -> PlannedResponse:
    """Every other request is refused for now."""
    if asked.times % 2 == 0:
        return PlannedResponse(503, b'{"error": "draining"}', {"Retry-After": "0"})
    return answer(asked, 200, attribution(asked.inquiry))


def blames(asked: Asked, server: AttributionServer) -> PlannedResponse:
    """RESTART, for the node that failed is at fault."""
    nodes = (asked.inquiry.failed.node,) if asked.inquiry.failed else asked.inquiry.nodes[:1]
    fields = {"scope": Scope.NODE, "nodes": nodes, "fault": "gpu_fell_off_the_bus"}
    return answer(asked, 200, attribution(asked.inquiry, Verdict.RESTART, **fields))


def first_too_many(retry_after: str) -> Behaviour:
    """429 for the first request about an inquiry, with this Retry-After."""

    def behave(asked: Asked, server: AttributionServer) -> PlannedResponse:
        if asked.times == 0:
            return PlannedResponse(429, b'{"error": "too many requests"}', {"Retry-After": retry_after})
        return answer(asked, 200, attribution(asked.inquiry))

    return behave


def _whole(asked: Asked) -> bytes:
    return answer(asked, 200, attribution(asked.inquiry)).body


FIXED: dict[str, Behaviour] = {
    "stop": says(Verdict.STOP),
    "restart": says(Verdict.RESTART),
    "unknown": says(Verdict.UNKNOWN),
    "blame": blames,
    "garbage": lambda asked, server: PlannedResponse(200, b"<html>It works!</html>"),
    "wrong-key": lambda asked, server: answer(asked, 200, attribution(asked.inquiry), key="another"),
    "huge": lambda asked, server: PlannedResponse(200, b"[" * HUGE_BYTES),
    "dies": lambda asked, server: PlannedResponse(200, _whole(asked), cut=True),
    "dies-then-hangs": lambda asked, server: None if asked.times else PlannedResponse(200, _whole(asked), cut=True),
    "hang": lambda asked, server: None,
    "late": slow(30.0, Verdict.STOP),
    "flap": flaps,
    "changes": changes_its_mind,
    "forgets": forgets,
    "twice": lambda asked, server: PlannedResponse(200, _whole(asked), {"Twice": "yes"}),
    "401": lambda asked, server: PlannedResponse(401, b'{"error": "a bearer token is required"}'),
    "404": lambda asked, server: PlannedResponse(404, b"<h1>Not Found</h1>"),
    "failed": lambda asked, server: PlannedResponse(
        200, msgspec.json.encode({"key": str(asked.inquiry.key), "state": "failed", "problem": "no logs there"})
    ),
}


def behaviour(text: str) -> Behaviour:
    """By its name: one of `FIXED`, `slow:8s`, `slow-restart:8s`, `429:2`, `redirect:URL`."""
    name, _, value = text.partition(":")
    made: dict[str, Callable[[], Behaviour]] = {
        "slow": lambda: slow(parse_duration(value), Verdict.STOP),
        "slow-restart": lambda: slow(parse_duration(value), Verdict.RESTART),
        "429": lambda: first_too_many(value),
        "redirect": lambda: lambda asked, server: PlannedResponse(307, b"", {"Location": value}),
    }
    try:
        return made[name]() if value else FIXED[name]
    except (KeyError, ValueError):
        valid = ", ".join([*FIXED, *(f"{each}:VALUE" for each in made)])
        raise ValueError(f"must be one of {valid}, not {text!r}") from None


class AttributionServer:
    """Listens on loopback until `close`. `behaviour` may be changed at any time; `asked` grows with each request."""

    def __init__(self, behaviour: Behaviour, *, token: str | None = None) -> None:
        self.behaviour, self.token = behaviour, token
        self.asked: list[Asked] = []
        self.connections = 0
        self.over = threading.Event()
        self._submitted: dict[str, Asked] = {}
        self._lock = threading.Lock()
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.attribution = self
        self.port: int = self._http.server_address[1]
        # `shutdown` waits for the loop's next look, which by default comes every half second.
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.over.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def note(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Asked | None:
        """A request, with what is known of its inquiry; None: of an inquiry that was never submitted."""
        with self._lock:
            if method == "POST":
                said = json.loads(body)
                inquiry = msgspec.convert(said["inquiry"], Inquiry, str_keys=True)
                identity = hashlib.sha256(str(inquiry.key).encode()).hexdigest()[:32]
                asked = Asked(method, path, headers, inquiry, said["intent"], said["settled"], time.monotonic(), 0)
            else:
                identity = path.partition("?")[0].rpartition("/")[2]
                if identity not in self._submitted:
                    return None
                asked = self._submitted[identity]._replace(method=method, path=path, headers=headers)
            if (before := self._submitted.get(identity)) is not None:
                # A second submission does not start the clock again: the service works on it since the first.
                asked = asked._replace(since=before.since, times=before.times + 1)
            self._submitted[identity] = asked
            self.asked.append(asked)
            return asked


class _Server(ThreadingHTTPServer):
    attribution: AttributionServer
    daemon_threads = True
    # With Python's 5 the kernel drops a burst of connections, and their clients try again after a second.
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone away is nothing to print."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or a body waits 40 ms for the acknowledgement of its header
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.attribution.connections += 1

    def do_POST(self) -> None:
        self._serve(self.rfile.read(int(self.headers["Content-Length"])))

    def do_GET(self) -> None:
        self._serve(b"")

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _serve(self, body: bytes) -> None:
        service = self.server.attribution
        headers = {name.lower(): value for name, value in self.headers.items()}
        if service.token is not None and headers.get("authorization") != f"Bearer {service.token}":
            return self._respond(PlannedResponse(401, b'{"error": "a bearer token is required"}'))
        asked = service.note(self.command, self.path, headers, body)
        if asked is None:
            return self._respond(PlannedResponse(404, b'{"error": "no such inquiry"}'))
        response = service.behaviour(asked, service)
        if response is None:
            # Open and silent until the service ends, and then of no use for another request.
            service.over.wait()
            self.close_connection = True
            return None
        return self._respond(response)

    def _respond(self, response: PlannedResponse) -> None:
        self.send_response(response.status)
        for name, value in {"Content-Length": str(len(response.body)), **response.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if response.cut:
            self.wfile.write(response.body[: len(response.body) // 2])
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.wfile.write(response.body)
        if "Twice" in response.headers:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")


def main() -> None:
    """Serve until SIGTERM or SIGINT; says so, and where, once it listens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--behaviour", type=behaviour, default=FIXED["stop"], help=behaviour.__doc__)
    options = parser.parse_args()
    signals = {signal.SIGTERM, signal.SIGINT}
    # Before the server's threads begin, which inherit the mask: else one of them would take the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    server = AttributionServer(options.behaviour)
    print(f"listening on {server.url}", flush=True)
    signal.sigwait(signals)
    server.over.set()


if __name__ == "__main__":
    main()
