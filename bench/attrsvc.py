"""A cached answer of the attribution service against a bare Starlette application; its health while it analyses."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from statistics import fmean, quantiles

import msgspec

from bench.errors import PeerFailed
from bench.processes import temporary_folder, wait_until
from bench.tables import Target, in_turns, print_rows, print_target, print_targets
from nvrx_slurm.attribution.service.wire import id_of
from nvrx_slurm.journal.verdicts import FailureKey, Inquiry

REQUESTS = 1000
WITHIN_S = 60.0
LOG_BYTES = 300 << 20
OURS, BARE = "attrsvc, a cached answer", "bare Starlette, the same bytes"
JSON = {"Content-Type": "application/json"}
CRASH = """\
Traceback (most recent call last):
  File "/home/u/train.py", line 4, in <module>
    import flash_attn_3
ModuleNotFoundError: No module named 'flash_attn_3'
"""


def attrsvc(runs: int, _: Path) -> None:
    """In turns, one client on one connection."""
    with temporary_folder() as room:
        (room / "logs").mkdir()
        (room / "logs" / "rank-0.err").write_text(CRASH)
        options = ("--bind", "127.0.0.1:0", "--root", str(room / "logs"), "--workers", "1", "--rate", "1000000")
        program = (sys.executable, "-P", "-m", "nvrx_slurm", "attrsvc", *options)
        with _started(room, *program, "--port-file", str(room / "port-ours")) as ours:
            path, body = _asked(ours, room / "logs" / "rank-0.err")
            (room / "body").write_bytes(body)
            script = Path(__file__).with_name("bare_app.py")
            with _started(room, sys.executable, str(script), str(room / "port-bare"), str(room / "body")) as bare:
                servers = {OURS: ours, BARE: bare}
                samples = in_turns(runs, {name: partial(_mean_s, each, path) for name, each in servers.items()})
            print_rows(f"one request of {REQUESTS}", samples, unit="ms", first=BARE)
            for name, taken in samples.items():
                print(f"  {name}: {1.0 / min(taken):.0f} requests/s at best")
            print_targets(samples, [Target("at most 2 × a bare application", BARE, (OURS,), at_most=2.0)])
            _health(ours, room)


def _health(connection: HTTPConnection, room: Path) -> None:
    """How long /healthz takes while a worker reads a long log."""
    log = room / "logs" / "long.log"
    line = b"2026-11-21 18:00:00,000 step 12 loss 2.31 lr 1e-4 grad_norm 0.71 tokens/s 12345\n"
    log.write_bytes(line * (LOG_BYTES // len(line)))
    body = msgspec.json.encode({"inquiry": _inquiry(log, cycle=1), "intent": "terminal"})
    began = time.monotonic()
    connection.request("POST", "/v1/inquiries", body, JSON)
    path = f"/v1/inquiries/{msgspec.json.decode(connection.getresponse().read())['id']}"
    taken = list[float]()
    while msgspec.json.decode(_get(connection, path))["state"] in ("queued", "running"):
        taken += _timed(connection, "/healthz", 20)
    slowest, most = max(taken) * 1000.0, quantiles(taken, n=100)[98] * 1000.0
    print(f"\nhealth while {LOG_BYTES >> 20} MiB are analysed in {time.monotonic() - began:.1f} s")
    print(f"  99 of 100 of {len(taken)} requests within {most:.1f} ms, the slowest {slowest:.1f} ms")
    print_target("health within 100 ms", slowest, at_most=100.0)


def _mean_s(connection: HTTPConnection, path: str) -> float:
    return fmean(_timed(connection, path, REQUESTS))


def _timed(connection: HTTPConnection, path: str, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        _get(connection, path)
        taken.append(time.perf_counter() - began)
    return taken


def _get(connection: HTTPConnection, path: str) -> bytes:
    connection.request("GET", path)
    return connection.getresponse().read()


def _asked(connection: HTTPConnection, log: Path) -> tuple[str, bytes]:
    """Where the answer about this log is, and what it is."""
    inquiry = _inquiry(log, cycle=0)
    body = msgspec.json.encode({"inquiry": inquiry, "intent": "terminal"})
    connection.request("POST", "/v1/inquiries", body, {**JSON, "Prefer": "wait=60"})
    return f"/v1/inquiries/{id_of(inquiry.key)}", connection.getresponse().read()


def _inquiry(log: Path, *, cycle: int) -> Inquiry:
    key = FailureKey(job="/jobs/bench", generation=0, replica="main-0", cycle=cycle, rank=0)
    return Inquiry(key=key, paths=(str(log),))


@contextmanager
def _started(room: Path, *argv: str) -> Iterator[HTTPConnection]:
    """A connection to a server that writes its port into the first file named `port-…` of its arguments."""
    port_file = next(Path(each) for each in argv if Path(each).name.startswith("port-"))

    def has_port() -> bool:
        if server.poll() is not None:
            raise PeerFailed((room / "log").read_text())
        return port_file.exists() and port_file.read_text().endswith("\n")

    with (room / "log").open("a") as log, subprocess.Popen(argv, stdout=log, stderr=log) as server:
        try:
            wait_until(has_port, WITHIN_S, f"the port of {argv[-2:]}")
            connection = HTTPConnection("127.0.0.1", int(port_file.read_text()), timeout=WITHIN_S)
            yield connection
            connection.close()
        finally:
            server.kill()
