"""`python -m tests.transport.ring_bytecodes WHAT STRIDE`: check a ring after a fault between two bytecodes.

WHAT is `die` (the process is killed there), `raise` (a handler raises there), `inherit` (the same, in a process that
takes a lock over from a dead one), or `use` (a handler uses the ring there); before each STRIDEth bytecode. Prints
the number of bytecodes of each operation. It forks, and so needs a process of its own with one thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from nvrx_slurm.transport.errors import TransportError
from nvrx_slurm.transport.ref import PayloadRef
from nvrx_slurm.transport.ring import Claim, SharedRing
from nvrx_slurm.transport.ring_locks import holding
from nvrx_slurm.transport.slots import State
from tests.unit.inprocess.bytecodes import at_bytecode

OURS = ("/transport/ring", "/transport/copying.py", "/transport/slots.py")
DATA = b"payload" * 20


Try = Callable[[int, Callable[[], object]], bool]
"""Runs the call with the fault before the bytecode of that number; returns whether the call has so many bytecodes."""


class Raised(BaseException):
    """What a handler raises: an exception that no code catches."""


def is_ours(frame: FrameType) -> bool:
    return any(part in frame.f_code.co_filename for part in OURS)


def operations(ring: SharedRing) -> Iterator[tuple[str, Callable[[], object]]]:
    """The operations to interrupt; before each of them the ring has one payload and one free slot."""
    yield "write", lambda: ring.write_raw(DATA)
    yield "read", lambda: ring.try_read()
    yield "renew", lambda: renew(ring)
    yield "settle", lambda: ring.settle(*oldest(ring))
    yield "take", lambda: take(ring)
    yield "view", lambda: view(ring)


def renew(ring: SharedRing) -> None:
    claim = ring.claim(*oldest(ring))
    if isinstance(claim, Claim):  # otherwise a handler was faster
        claim.renew(60.0)
        claim.finish(consumed=False)


def take(ring: SharedRing) -> None:
    index, generation = oldest(ring)
    ref = PayloadRef(node="", ring=ring.name, slot=index, generation=generation, size=len(DATA))
    buffer = memoryview(bytearray(len(DATA)))
    if ring.peek(ref, buffer) and ring.take(ref, consume=True):
        assert buffer == DATA


def view(ring: SharedRing) -> None:
    with contextlib.suppress(TransportError), ring.view(keep=True, timeout_s=0.0) as payload:
        assert payload == DATA


def oldest(ring: SharedRing) -> tuple[int, int]:
    index = next(iter(ring.get_ready_indices()), 0)
    return index, ring.slot_states()[index].generation


def fresh(ring: SharedRing) -> None:
    """Leave the ring with one payload and one free slot."""
    while ring.try_read() is not None:
        pass
    ring.write_raw(DATA)


def check(ring: SharedRing, where: str) -> None:
    """Assert that all locks are free, no slot is in use, all payloads are whole, and each is counted once."""
    in_another_thread(lambda: [holding(lock, lambda: None, 0.0) for lock in ring._steps.memory._locks], where)
    ring.get_ready_count()
    metrics = ring.metrics()
    assert metrics.states[State.WRITING] == metrics.states[State.READING] == 0, (where, ring.slot_states())
    assert metrics.published == metrics.consumed + metrics.dropped + metrics.states[State.READY], (where, metrics)
    while (read := ring.try_read()) is not None:
        assert read == DATA, where
    for _ in range(ring.slots + 1):
        ring.write_raw(DATA)
    assert ring.get_ready_count() == ring.slots, where


def in_another_thread(act: Callable[[], object], where: str) -> None:
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(act()))
    thread.start()
    thread.join(30)
    assert done, f"{where}: a lock was left"


def in_process(ring: SharedRing, act: Callable[[FrameType], None], prepare: Callable[[SharedRing], None]) -> Try:
    """Do this before that bytecode."""

    def attempt(number: int, call: Callable[[], object]) -> bool:
        prepare(ring)
        was_done = True
        with contextlib.suppress(Raised):
            _, was_done = at_bytecode(number, is_ours, act, call)
        return was_done

    return attempt


def in_child(ring: SharedRing) -> Try:
    """Kill a child before that bytecode."""

    def attempt(number: int, call: Callable[[], object]) -> bool:
        fresh(ring)
        child = os.fork()
        if child == 0:
            at_bytecode(number, is_ours, lambda _: os.kill(os.getpid(), signal.SIGKILL), call)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        return status != 0

    return attempt


def raise_there(_: FrameType) -> None:
    raise Raised


def use_there(ring: SharedRing) -> Callable[[FrameType], None]:
    """A handler that reads and writes. Where its own thread is in the middle of a step, it finds that slot taken."""

    def act(_: FrameType) -> None:
        former = sys.gettrace()
        sys.settrace(None)
        with contextlib.suppress(TransportError):
            ring.try_read()
        with contextlib.suppress(TransportError):
            ring.write_raw(DATA)
        sys.settrace(former)

    return act


def leave_locks(ring: SharedRing) -> None:
    """Leave all locks to a process that dies while it holds them."""
    fresh(ring)
    child = os.fork()
    if child == 0:
        take_all(ring)
    os.waitpid(child, 0)


def take_all(ring: SharedRing, index: int = 0) -> None:
    """Take all locks, one inside the other, and die."""
    if index == ring.slots:
        os.kill(os.getpid(), signal.SIGKILL)
    ring._steps.memory.holding(index, lambda: take_all(ring, index + 1), 1.0)


def main(what: str, stride: int) -> None:
    logging.getLogger("nvrx").setLevel(logging.ERROR)
    sys.unraisablehook = lambda _: None  # Python reports what a handler raises in a `__del__`
    places = {}
    with SharedRing.create(2, 256) as ring:
        attempt = {
            "die": in_child(ring),
            "raise": in_process(ring, raise_there, fresh),
            "inherit": in_process(ring, raise_there, leave_locks),
            "use": in_process(ring, use_there(ring), fresh),
        }[what]
        for name, call in operations(ring):
            number = 0
            while attempt(number, call):
                check(ring, f"{name} {number}")
                number += stride
            places[name] = number
    print(json.dumps(places))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
