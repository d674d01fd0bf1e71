"""Receivers of notifications, as real HTTP servers whose behaviour a test decides request by request."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tests.harness import WAIT_S

Write = asyncio.StreamWriter


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Behaviour = Callable[[Write], Awaitable[None]]


def answer(status: int, body: object = None, **headers: str) -> Behaviour:
    """A complete response; `Retry_After="1"` becomes a header."""

    async def behave(writer: Write) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(content)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)

    return behave


async def hang(writer: Write) -> None:
    """The connection stays open, and no response is sent."""
    await asyncio.Event().wait()


async def cut(writer: Write) -> None:
    """The connection breaks in the middle of the body."""
    writer.write(b"HTTP/1.1 200 X\r\nContent-Length: 500\r\n\r\n{")
    await writer.drain()
    writer.close()


class Server:
    """Each request is answered by the next of `behaviours`, and once these are used up, as a healthy server of this
    kind would."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.behaviours: list[Behaviour] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._came = asyncio.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen; after a `stop`, on the same port as before."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        self._server = None

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return when `holds` is true; it is evaluated with each request."""
        async with asyncio.timeout(WAIT_S), self._came:
            await self._came.wait_for(holds)

    async def has_had(self, count: int) -> None:
        """Return when this many requests have arrived."""
        await self.until(lambda: len(self.requests) >= count)

    def well(self, request: Request) -> Behaviour:
        raise NotImplementedError

    async def _accept(self, reader: asyncio.StreamReader, writer: Write) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            while not writer.is_closing() and (request := await _read(reader)) is not None:
                behave = self.behaviours.pop(0) if self.behaviours else self.well(request)
                async with self._came:
                    self.requests.append(request)
                    self._came.notify_all()
                await behave(writer)
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass  # asyncio would log a handler that raises CancelledError as an error of the server
        finally:
            self._serving.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()


class SlackServer(Server):
    """Accepts every message, and gives it a time stamp."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Any] = []

    def well(self, request: Request) -> Behaviour:
        self.messages.append(request.json)
        return answer(200, {"ok": True, "channel": "C42", "ts": f"1700000000.{len(self.messages):06}"})


class IndexServer(Server):
    """Keeps documents by id. Creating a document whose id exists is answered with 409."""

    def __init__(self) -> None:
        super().__init__()
        self.documents: dict[str, Any] = {}

    def well(self, request: Request) -> Behaviour:
        if request.path.endswith("/_bulk"):
            lines = [json.loads(line) for line in request.body.splitlines()]
            pairs = zip(lines[::2], lines[1::2], strict=True)
            items = [
                {"create": self._created(action["create"]["_id"], document) | {"_index": "i"}}
                for action, document in pairs
            ]
            return answer(200, {"took": 1, "errors": False, "items": items})
        identity = request.path.partition("?")[0].rpartition("/")[2]
        item = self._created(identity, request.json)
        return answer(item["status"], item)

    def _created(self, identity: str, document: Any) -> dict[str, Any]:
        if identity in self.documents:
            return {"_id": identity, "status": 409, "error": {"type": "version_conflict_engine_exception"}}
        self.documents[identity] = document
        return {"_id": identity, "status": 201}


async def _read(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.rstrip("\r\n").split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(method, path, headers, body)
