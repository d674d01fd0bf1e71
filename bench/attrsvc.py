"""A cached answer of the attribution service against a bare Starlette application; its health while it analyses."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from statistics import quantiles

import msgspec

from bench.tables import Target, print_rows, print_target, print_targets
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
    with tempfile.TemporaryDirectory(prefix="nvrx-bench-") as made:
        room = Path(made)
        (room / "logs").mkdir()
        (room / "logs" / "rank-0.err").write_text(CRASH)
        with _service(room) as ours:
            path, body = _asked(ours, room / "logs" / "rank-0.err")
            (room / "body").write_bytes(body)
            script = Path(__file__).with_name("bare_app.py")
            with _started(room, sys.executable, str(script), str(room / "port-bare"), str(room / "body")) as bare:
                samples: dict[str, list[float]] = {OURS: [], BARE: []}
                for _ in range(runs):
                    for name, connection in ((OURS, ours), (BARE, bare)):
                        samples[name] += [sum(taken := _timed(connection, path)) / len(taken)]
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
    print_target("health within 100 ms", slowest, met=slowest <= 100.0)


def _timed(connection: HTTPConnection, path: str, count: int = REQUESTS) -> list[float]:
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
def _service(room: Path) -> Iterator[HTTPConnection]:
    options = ("--bind", "127.0.0.1:0", "--root", str(room / "logs"), "--workers", "1", "--rate", "1000000")
    program = (sys.executable, "-P", "-m", "nvrx_slurm", "attrsvc", *options)
    with _started(room, *program, "--port-file", str(room / "port-ours")) as connection:
        yield connection


@contextmanager
def _started(room: Path, *argv: str) -> Iterator[HTTPConnection]:
    """A connection to a server that writes its port into the first file named `port-…` of its arguments."""
    port_file = next(Path(each) for each in argv if Path(each).name.startswith("port-"))
    with (room / "log").open("a") as log, subprocess.Popen(argv, stdout=log, stderr=log) as server:
        try:
            connection = HTTPConnection("127.0.0.1", _port(port_file, server, room), timeout=WITHIN_S)
            yield connection
            connection.close()
        finally:
            server.kill()


def _port(file: Path, server: subprocess.Popen[bytes], room: Path) -> int:
    deadline = time.monotonic() + WITHIN_S
    while not (file.exists() and file.read_text().endswith("\n")):
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError((room / "log").read_text())
        time.sleep(0.01)
    return int(file.read_text())
