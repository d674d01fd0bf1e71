"""nixl's one-sided read: the reader takes the bytes out of the producer's registered memory, and asks no process.

By its lower layer: the agent of its upper one has a thread that spins. These names are private to nixl 1.5.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

os.environ.setdefault("UCX_DEBUG_SIGNO", "0")  # before it is imported
os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")

from nixl_cu12 import _bindings as bindings

from bench.transport.carriers import base

POLL_US = 100_000


class Agent:
    """With memory that it has registered."""

    def __init__(self, name: str, *, serves: bool) -> None:
        config = bindings.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = serves, POLL_US
        config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
        self.agent = bindings.nixlAgent(f"{name}-{os.getpid()}", config)
        self.backends = [self.agent.createBackend("UCX", {})]

    def register(self, memory: Any) -> int:
        """Its address."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        described = bindings.nixlRegDList(bindings.DRAM_SEG, [(address, len(memory), 0, b"")])
        self.agent.registerMem(described, self.backends)
        return address


class Producer(base.ShelfProducer):
    def __init__(self, size: int, count: int, options: dict[str, Any]) -> None:
        super().__init__(size, count, options)
        self._agent = Agent("producer", serves=True)
        address = self._agent.register(self.shelf.mapped)
        self.where = [address, self._agent.agent.getLocalMD().hex()]


class Reader(base.Reader):
    def __init__(self, size: int, where: list[Any], options: dict[str, Any]) -> None:
        self._base, peer = where
        self._size, self._buffer = size, bytearray(size)
        self._agent = Agent("reader", serves=False)
        self._address = self._agent.register(self._buffer)
        self._peer = self._agent.agent.loadRemoteMD(bytes.fromhex(peer)).decode()

    def read(self, ref: int) -> bytearray:
        agent, size = self._agent.agent, self._size
        here = bindings.nixlXferDList(bindings.DRAM_SEG, [(self._address, size, 0)])
        there = bindings.nixlXferDList(bindings.DRAM_SEG, [(self._base + ref * size, size, 0)])
        handle = agent.createXferReq(bindings.NIXL_READ, here, there, self._peer, "", self._agent.backends)
        state = agent.postXferReq(handle)
        while state == bindings.NIXL_IN_PROG:  # there is nothing to wait on
            os.sched_yield()
            state = agent.getXferStatus(handle)
        agent.releaseXferReq(handle)
        assert state == bindings.NIXL_SUCCESS, state
        return self._buffer
