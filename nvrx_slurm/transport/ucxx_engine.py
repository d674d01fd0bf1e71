"""The one thread of a process that owns UCX: its workers, and all endpoints.

Other threads post callables. The thread runs them, lets UCX progress until nothing moves any more, passes on
the messages that have arrived, and sleeps on UCX's own descriptors, on the bootstrap sockets (whose end is the end of
a connection), and on an eventfd that wakes it. There is no asyncio, no thread of UCXX's, and no Python future: with
those, a parked receive costs at least 4 % of a core, and the process does not end by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import heapq
import importlib
import itertools
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from nvrx_slurm.transport.errors import PeerRefused, PeerReset
from nvrx_slurm.transport.ucxx_peer import NUMBER_BITS, SHORT_BYTES, Done, Peer, SendCompletion, ignore
from nvrx_slurm.util.log import get_logger

if TYPE_CHECKING:
    from nvrx_slurm.transport.ucxx import WorkerHello

STOP_S = 0.5  # at the end of the process: so long may what was sent take to arrive
JOIN_S = 2.0

_ENDED = "UCX has ended in this process"

_log = get_logger("transport")


class _Transfer(NamedTuple):
    """What UCX works at. `memory` is referenced as long as UCX may touch it: UCX itself does not see to that."""

    requests: list[Any]
    memory: Sequence[object]
    done: Done


class Engine:
    """Made at first use, and there until the process ends. Other threads may only `post` and `stop`."""

    def __init__(self) -> None:
        self.ucx = _load()
        self.serving: UcxWorker
        self.calling: UcxWorker
        self.fallen: deque[Peer] = deque()
        self._context: Any = None
        self._sides: list[UcxWorker] = []
        self._watched: dict[int, Peer] = {}
        self._peers: dict[int, Peer] = {}
        self._transfers: list[_Transfer] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._guard = threading.Lock()
        self._posts: deque[Callable[[], None]] = deque()
        self._is_parked = self.has_ended = False
        self._stop_by = math.inf
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not poll: a server has a thousand connections.
        self._poll = select.epoll()
        started = SendCompletion()
        self._thread = threading.Thread(target=self._run, args=(started,), name="ucx", daemon=True)
        self._thread.start()
        started.wait()
        if started.error is not None:
            raise PeerRefused(f"UCX does not start: {started.error}") from None

    def post(self, step: Callable[[], None]) -> None:
        """Have the engine's thread run `step`. Raises PeerReset where there is none any more."""
        with self._guard:
            if self.has_ended:
                raise PeerReset(_ENDED)
            self._posts.append(step)
            if self._is_parked:
                self._is_parked = False
                os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Stop at the end of the process: what was sent gets a moment to arrive."""

        def leave_all() -> None:
            self._stop_by = time.monotonic() + STOP_S
            # This timer wakes the thread by then.
            self.later(STOP_S, lambda: None)
            for peer in list(self._peers.values()):
                peer.leave()

        with contextlib.suppress(PeerReset):
            self.post(leave_all)
        self._thread.join(JOIN_S)

    def abandon(self) -> None:
        """Give the engine up in a forked child, where its thread is not."""
        self._guard, self.has_ended = threading.Lock(), True
        # Never freed: that would end the parent's connections.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        for peer in self._watched.values():
            peer.drop()

    def know(self, peer: Peer) -> None:
        self._peers[peer.number] = peer

    def forget(self, peer: Peer) -> None:
        self._peers.pop(peer.number, None)

    def watch(self, descriptor: int, peer: Peer) -> None:
        """Take the end of this socket, or a byte on it, as the end of the peer."""
        self._watched[descriptor] = peer
        self._poll.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        del self._watched[descriptor]
        self._poll.unregister(descriptor)

    def call(self, side: UcxWorker, theirs: WorkerHello) -> Any:
        """The endpoint that belongs to a server's."""
        endpoint = side.nth(theirs.address, theirs.turn)
        if side.is_spent and side is self.calling:
            self.calling = self._new_side()
        return endpoint

    def start(self, requests: Sequence[Any], memory: Sequence[object], done: Done) -> None:
        """Call `done` when all `requests` are."""
        self._transfers.append(_Transfer(list(requests), memory, done))

    def later(self, after_s: float, step: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + after_s, next(self._count), step))

    def drain(self, side: UcxWorker, message: Any) -> None:
        """Receive a message and drop it."""
        if message.length <= SHORT_BYTES:
            buffer = bytearray(message.length or 1)
            self.start([side.take(message, memoryview(buffer))], (buffer, message), ignore)

    def _run(self, started: SendCompletion) -> None:
        try:
            self._context = self.ucx.context({"RNDV_THRESH": str(SHORT_BYTES)})
            self.serving, self.calling = self._new_side(), self._new_side()
            self._poll.register(self._wake, select.EPOLLIN)
        except Exception as error:
            # UCXX has an exception class for each status; the caller of Engine() gets it.
            self.has_ended = True
            started.settle(error)
            return
        started.settle()
        try:
            # After `stop`, until all peers have left, or the time for it is over.
            while not (self._stop_by < math.inf and (not self._peers or time.monotonic() >= self._stop_by)):
                self._turn()
        except Exception:
            _log.exception("UCX failed: its connections end; the next connection starts it again")
        finally:
            self._end()

    def _new_side(self) -> UcxWorker:
        side = UcxWorker(self.ucx, self._context, self.later)
        self._poll.register(side.worker.epoll_file_descriptor, select.EPOLLIN)
        self._sides.append(side)
        return side

    def _turn(self) -> None:
        while self._posts:
            self._posts.popleft()()
        self._progress()
        # Messages before ends: what a connection has sent last arrives before its end.
        for side in self._sides:
            while (message := side.message()) is not None:
                kind, number = divmod(message.sender_tag.value, 1 << NUMBER_BITS)
                peer = self._peers.get(number)
                if peer is None:
                    self.drain(side, message)
                else:
                    peer.has_come(kind, message)
        while self.fallen:
            self.fallen.popleft().has_fallen()
        self._settle()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        if all(side.worker.arm() for side in self._sides):
            # Under the lock: `post` either sees `_is_parked` and writes to the eventfd, or its step is seen here.
            with self._guard:
                if self._posts:
                    return
                self._is_parked = True
            left_s = self._timers[0][0] - time.monotonic() if self._timers else None
            ready = self._poll.poll(None if left_s is None else max(0.0, left_s))
            with self._guard:
                self._is_parked = False
            for descriptor, _ in ready:
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                elif descriptor in self._watched:
                    self.fallen.append(self._watched[descriptor])

    def _progress(self) -> None:
        for side in self._sides:
            side.worker.progress()

    def _settle(self) -> None:
        """Complete the transfers that are done, until none is: a completion may start one that is done at once."""
        while True:
            done: list[_Transfer] = []
            going: list[_Transfer] = []
            for transfer in self._transfers:
                (done if all(each.completed for each in transfer.requests) else going).append(transfer)
            if not done:
                return
            self._transfers = going
            for transfer in done:
                failure: Exception | None = None
                for request in transfer.requests:
                    try:
                        request.check_error()
                    except Exception as error:
                        # UCXX has an exception class for each status; all mean the same here.
                        failure = PeerReset(f"the connection broke: {error}")
                        break
                transfer.done(failure)

    def _end(self) -> None:
        # Every thread that waits for a transfer is released, even where UCX has failed.
        with self._guard:
            self.has_ended = True
        for peer in list(self._peers.values()):
            with contextlib.suppress(Exception):
                peer.end(_ENDED)
        while self._posts:
            with contextlib.suppress(Exception):
                self._posts.popleft()()
        until = time.monotonic() + STOP_S
        with contextlib.suppress(Exception):
            while self._transfers and time.monotonic() < until:
                self._progress()
                self._settle()
        for transfer in self._transfers:
            with contextlib.suppress(Exception):
                transfer.done(PeerReset(_ENDED))


_guard = threading.Lock()
_engine: Engine | None = None
_is_begun = _is_forked = False


def engine() -> Engine:
    """The engine of this process. Raises PeerRefused where there can be none."""
    global _engine, _is_begun
    with _guard:
        if _is_forked:
            raise PeerRefused(
                "UCX was in use when this process was forked, and does not work in the child: "
                "fork before its first use, or start the process by spawn"
            )
        if _engine is None or _engine.has_ended:
            was_begun, _is_begun = _is_begun, True
            try:
                _engine = Engine()
            except PeerRefused:
                _is_begun = was_begun
                raise
        return _engine


def _at_exit() -> None:
    if _engine is not None:
        _engine.stop()


def _after_fork() -> None:
    global _guard, _engine, _is_forked
    # UCX has threads of its own, which are not in the child and which it does not start again. Where it was being
    # loaded, locks stay taken for ever.
    _guard = threading.Lock()
    _is_forked = _is_forked or _is_begun
    if _engine is not None:
        _engine.abandon()
        _engine = None


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)


# For one other worker. UCX counts them in sixteen bits, and joins none beyond.
MOST_MADE = 60_000
MOST_AHEAD = 256  # connections between two processes that are made at the same time
SPARE_S = 5.0  # so long may the answer of one that was overtaken still be on its way; else it is lost


class UcxWorker:
    """`is_spent`: another worker must be taken for what comes next."""

    def __init__(
        self, ucx: SimpleNamespace, context: Any, later: Callable[[float, Callable[[], None]], None]
    ) -> None:
        self._ucx, self._later = ucx, later
        self._any_tag = ucx.tag(0), ucx.tag_mask(0)
        self.worker = ucx.worker(context)
        self.worker.init_blocking_progress_mode()
        self.address: bytes = ucx.address.create_from_worker(self.worker).tobytes()
        self.is_spent = False
        self._made: dict[bytes, int] = {}
        self._spare: dict[tuple[bytes, int], Any] = {}

    def next(self, theirs: bytes) -> tuple[int, Any]:
        """The server's next endpoint to a client, and its number among them."""
        index = self._made.get(theirs, 0)
        if index > MOST_MADE + MOST_AHEAD:
            raise PeerReset("there were too many connections between these two processes")
        address = self._ucx.address.create_from_buffer(theirs)
        endpoint = self._ucx.endpoint.create_from_worker_address(self.worker, address, True)
        self._made[theirs] = index + 1
        self.is_spent = self.is_spent or index >= MOST_MADE
        return index, endpoint

    def nth(self, theirs: bytes, index: int) -> Any:
        """The client's endpoint of that number."""
        # The loop below makes an endpoint for each number up to `index`: a wrong one must not make thousands.
        if index > self._made.get(theirs, 0) + MOST_AHEAD:
            raise PeerReset(f"the server has named connection {index}")
        while self._made.get(theirs, 0) <= index:
            made, endpoint = self.next(theirs)
            self._spare[theirs, made] = endpoint
            if made < index:
                self._later(SPARE_S, lambda key=(theirs, made): self._drop(key))  # type: ignore[misc]
        endpoint = self._spare.pop((theirs, index), None)
        if endpoint is None:
            raise PeerReset("its answer came too late")
        return endpoint

    def message(self) -> Any:
        """The next message that has arrived, or None."""
        message = self.worker.tag_probe(*self._any_tag, True)
        return message if message.matched else None

    def take(self, message: Any, buffer: memoryview) -> Any:
        """Begin to receive into `buffer`, which is as long as the message: UCX trusts that."""
        return self.worker.tag_recv_with_handle(self._ucx.array(buffer), message)

    def _drop(self, key: tuple[bytes, int]) -> None:
        endpoint = self._spare.pop(key, None)
        if endpoint is not None:
            endpoint.close_blocking()


# Where the user has said nothing else. UCX reads its environment when it is loaded.
SETTINGS = {
    "UCX_HANDLE_ERRORS": "none",  # SIGSEGV and its like belong to the program, and to its faulthandler
    "UCX_LOG_LEVEL": "fatal",  # a peer that goes is an exception, not a line on standard error
    "UCXX_LOG_LEVEL": "fatal",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_RNDV_FRAG_MEM_TYPE": "host",  # payloads lie in host memory; the binding would say "cuda"
    "UCX_USE_MT_MUTEX": "y",  # its threads wait for each other asleep, not spinning: half of the time of a connect
}

VERSION = "0.52"  # of the binding: what lies below its asyncio layer may be another in the next one
_INSTALL = "pip install 'nvrx-slurm[ucxx-cu12]' (or ucxx-cu13)"


@functools.cache
def _load() -> SimpleNamespace:
    """The parts of the binding that this package uses. Raises PeerRefused, which says what to install."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        version = importlib.import_module("ucxx").__version__
        library = importlib.import_module("ucxx._lib.libucxx")
        array = importlib.import_module("ucxx._lib.arr").Array
    except (ImportError, OSError) as error:
        raise PeerRefused(f"the ucxx transport is not there ({error}): {_INSTALL}") from None
    if not version.startswith(f"{VERSION}."):
        raise PeerRefused(f"ucxx {version} is installed, and {VERSION} is needed: {_INSTALL}")
    # `ucxx::Endpoint::getCancelingSize() const` drops the requests that have ended since they were cancelled. The
    # binding has no way to call it. Without it, a connection that was cut while it sent is never freed.
    canceling: Any = None
    with contextlib.suppress(OSError, AttributeError):
        canceling = ctypes.CDLL("libucxx.so")._ZNK4ucxx8Endpoint16getCancelingSizeEv
        canceling.argtypes, canceling.restype = [ctypes.c_void_p], ctypes.c_size_t
    return SimpleNamespace(
        context=library.UCXContext,
        worker=library.UCXWorker,
        address=library.UCXAddress,
        endpoint=library.UCXEndpoint,
        tag=library.UCXXTag,
        tag_mask=library.UCXXTagMask,
        array=array,
        canceling=canceling,
    )
