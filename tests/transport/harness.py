"""What the tests of the transport share: bounds, payloads in which every byte shows its place, and other
processes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import xxhash

from nvrx_slurm.transport.errors import PayloadTimeout, TransportError
from nvrx_slurm.transport.protocol import PeerLink, TokenHandshake, pass_through
from nvrx_slurm.transport.ring import SharedRing
from nvrx_slurm.transport.server import ServerLimits, serve
from tests.waiting import until

T = TypeVar("T")

PROCESSES = multiprocessing.get_context("forkserver")
"""Starts the nodes and the far ends of links. Each is a process of its own, which need not import numpy again."""
PROCESSES.set_forkserver_preload(["tests.transport.links", "tests.transport.nodes"])

WAIT_S = 30.0
PROMISED_S = 0.1
"""How far from its deadline a call may end, earlier or later."""
ROOM_S = 10.0
"""Added for a machine that other tests keep busy for seconds. A wait without a deadline of its own takes `WAIT_S`."""
TOKEN = b"one token of the job, 32 bytes.."


def soon(seconds: float = WAIT_S) -> float:
    return time.monotonic() + seconds


def pattern(size: int, seed: int = 1) -> memoryview:
    """Bytes of which each group of eight shows its place, and the payload that it belongs to."""
    words = np.arange(-(-size // 8), dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64(seed)
    return memoryview(words).cast("B")[:size]


def admit_and_serve(link: PeerLink, rings: Mapping[str, SharedRing], limits: ServerLimits) -> None:
    """The server's side of one connection, in the caller's thread, over any link."""
    with contextlib.suppress(TransportError):
        if pass_through(link, TokenHandshake(TOKEN, limits.eviction_s), soon(limits.hello_s)):
            serve(link, rings, limits)


def read_threads() -> set[threading.Thread]:
    """The threads of all payload clients of this process."""
    return {thread for thread in threading.enumerate() if thread.name == "payload read"}


def without_ucx() -> dict[str, str]:
    """The environment of a process that loads UCX by itself: without this process's settings of UCX, and without the
    warning of ucxx where another package has installed pynvml."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UCX")}
    return kept | {"PYTHONWARNINGS": "ignore::FutureWarning"}


def digest_of(data: bytes | bytearray | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[float]:
    """Yield a deadline, and assert that the block ends by then, whether or not it raises."""
    began = time.monotonic()
    yield began + seconds
    took = time.monotonic() - began
    assert took <= seconds + PROMISED_S + ROOM_S, f"took {took:.3f} s, with a deadline of {seconds} s"


@contextlib.contextmanager
def on_deadline(seconds: float) -> Iterator[float]:
    """Yield a deadline, and assert that the block ends with PayloadTimeout at that time, neither earlier nor
    later."""
    with bounded(seconds) as deadline, pytest.raises(PayloadTimeout):
        yield deadline
    early = deadline - time.monotonic()
    assert early <= PROMISED_S, f"it gave up {early:.3f} s before its deadline"


@dataclasses.dataclass(frozen=True)
class Usage:
    """What all threads of a process have used so far."""

    at: float
    demand_s: float
    """The time that threads ran or were ready to run: on a busy machine a spinning thread does not always run."""
    wakeups: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        ran_and_waited = [(task / "schedstat").read_text().split()[:2] for task in tasks]
        status = "".join((task / "status").read_text() for task in tasks)
        wakeups = sum(map(int, re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.MULTILINE)))
        return cls(time.monotonic(), sum(int(ns) for both in ran_and_waited for ns in both) / 1e9, wakeups)


def assert_idle(*pids: int) -> None:
    """Assert that the processes neither spin nor poll: in 3 s they are ready to run for at most a tenth of the time,
    and wake at most ten times a second. The best of three tries counts, since a process may first have work to
    finish."""
    usages = []
    for _ in range(3):
        before = [Usage.of(pid) for pid in pids]
        threading.Event().wait(3.0)
        after = [Usage.of(pid) for pid in pids]
        usages.append((before, after))
        if all(
            end.demand_s - start.demand_s < 0.1 * (end.at - start.at)
            and end.wakeups - start.wakeups < 10 * (end.at - start.at)
            for start, end in zip(before, after, strict=True)
        ):
            return
    pytest.fail(f"not idle: {usages}")


def rings_of(pid: int) -> list[str]:
    """The rings of a process in shared memory."""
    return [path.name for path in Path("/dev/shm").glob(f"nvrx-ring-{pid}-*")]


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that is alive but neither sends nor reads (SIGSTOP)."""
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: _state(pid) == "T", f"{pid} is stopped")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextlib.contextmanager
def signals_every(seconds: float, handler: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Have the main thread, which must be the caller's, handle a signal at this interval. A timer is not used, since
    pytest-timeout uses it. Garbage collection is off: Python drops an exception that a handler raises within a
    callback of gc, and hypothesis has such a callback."""
    over = threading.Event()
    main = threading.main_thread().ident
    assert main == threading.get_ident() and main is not None

    def strike(ident: int) -> None:
        while not over.wait(seconds):
            signal.pthread_kill(ident, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    thread = threading.Thread(target=strike, args=(main,))
    gc.disable()
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        gc.enable()
        signal.signal(signal.SIGUSR1, before)


class Async:
    """Work in a thread; `result` raises the exception of the work."""

    def __init__(self, work: Callable[..., Any], *args: Any) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self.began = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work, args), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.began.set()
        try:
            self._value = work(*args)
        except BaseException as error:
            self._error = error

    def result(self, timeout: float = WAIT_S) -> Any:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"not over in {timeout} s"
        if self._error is not None:
            raise self._error
        return self._value


class Strike:
    """Sends a sender a signal when its first bytes arrive. With `seen` the receiver does it, and is never late;
    otherwise a thread watches the buffer."""

    def __init__(self, pid: int, number: signal.Signals, buffer: bytearray) -> None:
        self._pid, self._number, self._buffer = pid, number, buffer
        self.watching = Async(self._watch)

    def seen(self, _: memoryview) -> None:
        with contextlib.suppress(ProcessLookupError):  # reaped, while its bytes are still being read
            os.kill(self._pid, self._number)

    def _watch(self) -> None:
        until(lambda: any(self._buffer[8:64]), "the first bytes")
        self.seen(memoryview(b""))
