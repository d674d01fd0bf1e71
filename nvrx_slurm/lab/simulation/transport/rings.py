"""Rings in memory that several simulated processes share, with locks that a death or a stop leaves taken."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

from nvrx_slurm.lab.simulation.threads import (
    Substitution,
    ThreadScheduler,
    Ticket,
    VirtualProcess,
    VirtualThread,
)
from nvrx_slurm.lab.simulation.transport.links import PayloadNetwork, SimulatedBackend
from nvrx_slurm.transport import (
    client,
    fetching,
    pool,
    protocol,
    ring,
    ring_access,
    ring_file,
    ring_locks,
    server,
    shm,
)
from nvrx_slurm.transport.errors import RingError
from nvrx_slurm.transport.ring import SharedRing
from nvrx_slurm.transport.ring_file import Creator, Header, Layout, Memory, RingShape
from nvrx_slurm.transport.ring_locks import Contended, Lock
from nvrx_slurm.util import threads as util_threads

T = TypeVar("T")
LOOK_AGAIN_S = 0.05


class _SlotLock:
    def __init__(self) -> None:
        self.holder: VirtualThread | None = None
        self.waiting: list[Ticket] = []


class RingKernel:
    """The memory of all hosts, and which processes are alive."""

    def __init__(self, scheduler: ThreadScheduler, network: PayloadNetwork, chance: Random) -> None:
        self.scheduler, self.network, self.chance = scheduler, network, chance
        self.processes: dict[tuple[int, int], VirtualProcess] = {}
        self._rings: dict[str, tuple[str, bytearray, Header]] = {}  # name → host, bytes, header
        self._locks: dict[tuple[str, int], _SlotLock] = {}
        self._waiting: dict[int, list[Ticket]] = {}  # futex

    def process(self, name: str, host: str) -> VirtualProcess:
        process = VirtualProcess(self.scheduler, name, host)
        self.processes[process.pid, process.began] = process

        def unlink() -> None:
            """The ring's file goes with its creator."""
            for ring_name, (_, _, header) in list(self._rings.items()):
                if header.creator[:2] == (process.pid, process.began):
                    del self._rings[ring_name]

        process.on_death(unlink)
        return process

    # ---- rings

    def create(self, shape: RingShape) -> SharedRing:
        """As `SharedRing.create`, without the file."""
        process = self.scheduler.process
        name = f"nvrx-ring-{process.pid}-{process.began}-{len(self._rings):x}"
        layout = Layout(shape.slots, shape.slot_bytes)
        header = Header(Creator(process.pid, process.began, 1), shape)
        self._rings[name] = process.host, bytearray(layout.total_bytes), header
        return self.attach(name)

    def attach(self, name: str, **_: object) -> SharedRing:
        host, data, header = self._rings.get(name, ("", bytearray(), None))
        if header is None or host != self.scheduler.process.host:
            raise RingError(f"there is no {name} on this host")
        memory = Memory(data, Layout(header.shape.slots, header.shape.slot_bytes), name)  # type: ignore[arg-type]  # a buffer
        return SharedRing(memory, name, header, Path("/dev/shm"), allow_pickle=False)

    def is_gone(self, name: str) -> bool:
        return name not in self._rings

    # ---- the calls of `ring_locks`

    def this_process(self) -> tuple[int, int]:
        process = self.scheduler.process if self.scheduler.current is not None else None
        return (0, 0) if process is None else (process.pid, process.began)

    def runs(self, pid: int, ticks: int) -> bool:
        process = self.processes.get((pid, ticks))
        return process is not None and process.alive

    def holding(self, lock: Lock, act: Callable[[], T], patience_s: float) -> T:
        scheduler, thread = self.scheduler, self.scheduler.current
        if scheduler.is_closing:
            raise Contended
        assert thread is not None
        held = self._locks.setdefault(lock.key, _SlotLock())
        until = scheduler.now_s + patience_s
        scheduler.maybe_switch()
        # Robust: the lock of a dead process is the next one's at once. That of a stopped one stays taken.
        while held.holder is not None and held.holder.process.alive:
            if scheduler.now_s >= until:
                raise Contended
            held.waiting.append(scheduler.ticket())
            scheduler.park(min(until, scheduler.now_s + LOOK_AGAIN_S))
        held.holder = thread
        try:
            return act()
        finally:
            if held.holder is thread:
                held.holder = None
                waiting, held.waiting = held.waiting, []
                for ticket in waiting:
                    scheduler.wake(ticket)

    def wake_all(self, address: int) -> None:
        ctypes.c_uint32.from_address(address).value += 1
        for ticket in self._waiting.pop(address, ()):
            self.scheduler.wake(ticket)

    def wait(self, address: int, seen: int, timeout_s: float) -> None:
        if ctypes.c_uint32.from_address(address).value == seen and timeout_s > 0:
            self._waiting.setdefault(address, []).append(self.scheduler.ticket())
            self.scheduler.park(self.scheduler.now_s + min(timeout_s, ring_locks.SLICE_S))

    # ---- names

    def substituted(self) -> Substitution:
        """The product's modules on this kernel."""
        names = Substitution(self.scheduler)
        threading, time = names.threading, names.time
        backend: Any = lambda *_: SimulatedBackend(self.network)  # noqa: E731  # a name for three modules
        names.over(util_threads, threading=threading, time=time, queue=names.queue, Future=names.future)
        names.over(client, threading=threading, time=time, wait=names.wait)
        names.over(
            server,
            threading=threading,
            time=time,
            by_scheme=backend,
            node_name=lambda: self.scheduler.process.host,
            default_host=lambda: self.scheduler.process.host,
        )
        dice = SimpleNamespace(random=self.chance.random, randrange=self.chance.randrange)
        names.over(fetching, threading=threading, time=time, random=dice, by_scheme=backend, is_gone=self.is_gone)
        names.over(pool, threading=threading, time=time)
        names.over(protocol, secrets=SimpleNamespace(token_bytes=self.chance.randbytes))
        names.over(shm, threading=threading, SharedRing=SimpleNamespace(attach=self.attach), is_gone=self.is_gone)
        names.over(ring, time=time, this_process=self.this_process)
        names.over(ring_access, time=time, this_process=self.this_process)
        names.over(ring_file, holding=self.holding)
        names.over(
            ring_locks,
            time=time,
            this_process=self.this_process,
            runs=self.runs,
            wake_all=self.wake_all,
            wait=self.wait,
            # What the module keeps from call to call: each history begins without it.
            _open={},
            _alive_at={},
            _numbers=itertools.count(1),
        )
        return names
