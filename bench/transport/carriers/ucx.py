"""ucxx at its fastest over TCP: its lower layer, one thread, no futures; it waits for the worker's descriptor.

These names are private to ucxx 0.52. Its asyncio interface takes about twice as long for small messages.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import Any

os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # before it is imported
os.environ.setdefault("UCX_LOG_LEVEL", "fatal")

import ucxx.types
from ucxx._lib import libucxx
from ucxx._lib.arr import Array

from bench.transport.carriers import base

REQUESTS, PAYLOADS = ucxx.types.Tag(1), ucxx.types.Tag(2)


class Worker:
    """Progress only while a caller waits."""

    def __init__(self) -> None:
        self._context = libucxx.UCXContext({})
        self.worker = libucxx.UCXWorker(self._context, enable_delayed_submission=False, enable_python_future=False)
        self.worker.init_blocking_progress_mode()
        self._poll = select.poll()
        self._poll.register(self.worker.epoll_file_descriptor, select.POLLIN)

    def until(self, condition: Callable[[], Any]) -> None:
        while True:
            while self.worker.progress_once():
                pass
            if condition():
                return
            if self.worker.arm():
                self._poll.poll()

    def finish(self, request: Any) -> None:
        self.until(lambda: request.completed)
        request.check_error()

    def receive(self, endpoint: Any, buffer: Any, tag: Any) -> Any:
        return endpoint.tag_recv(Array(buffer), tag, ucxx.types.TagMaskFull)


class Producer(base.ShelfProducer):
    def __init__(self, size: int, count: int, options: dict[str, Any]) -> None:
        super().__init__(size, count, options)
        self.where, listens = 0, threading.Event()
        threading.Thread(target=self._serve, args=(listens,), daemon=True).start()
        listens.wait()

    def _serve(self, listens: threading.Event) -> None:
        worker, endpoints = Worker(), list[Any]()
        listener = libucxx.UCXListener.create(
            worker=worker.worker, port=0, cb_func=endpoints.append, cb_args=(), deliver_endpoint=True
        )
        self.where = listener.port
        listens.set()
        worker.until(lambda: endpoints)
        frame = bytearray(base.REQUEST.size)
        while True:
            worker.finish(worker.receive(endpoints[0], frame, REQUESTS))
            slot, size = base.REQUEST.unpack(frame)
            payload = Array(self.shelf.at(slot)[:size])
            worker.finish(endpoints[0].tag_send(payload, PAYLOADS))


class Reader(base.Reader):
    def __init__(self, size: int, where: int, options: dict[str, Any]) -> None:
        self._worker = Worker()
        self._endpoint = libucxx.UCXEndpoint.create(self._worker.worker, base.LOOPBACK, where, True)
        self._size, self._buffer = size, bytearray(size)

    def read(self, ref: int) -> bytearray:
        frame = Array(base.REQUEST.pack(ref, self._size))  # ucxx does not keep it alive
        coming = self._worker.receive(self._endpoint, self._buffer, PAYLOADS)
        self._worker.finish(self._endpoint.tag_send(frame, REQUESTS))
        self._worker.finish(coming)
        return self._buffer
