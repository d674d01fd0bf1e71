"""A real MCP server over stdio that behaves as its argument says; `python tests/mcp_script.py BEHAVIOUR`.

The JSON-RPC is written by hand, so that the server can misbehave and starts at once.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODE, *REST = sys.argv[1:]
Message = dict[str, Any]


def write(text: str) -> None:
    os.write(1, text.encode())


def reply(request: Message, result: Message) -> None:
    write(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}) + "\n")


def key_of(inquiry: Message) -> str:
    key = inquiry["key"]
    rank = f"rank-{key['rank']}" if "rank" in key else "node"
    return f"{key['job']}:{key['generation']}:{key['replica']}:{key['cycle']}:{rank}"


def answer(request: Message, verdict: str = "STOP", **changed: Any) -> Message:
    """The tool's result, in the form of docs/attrsvc.md."""
    inquiry = request["params"]["arguments"]["inquiry"]
    line = {"file": "rank.err", "line": 3, "text": "AssertionError", "rank": inquiry["key"].get("rank")}
    said = {"source": "scripted", "verdict": verdict, "confidence": 0.9, "primary": line}
    body = {"key": key_of(inquiry), "state": "done", "attribution": said, **changed}
    return {"content": [{"type": "text", "text": json.dumps(body)}], "structuredContent": body, "isError": False}


def as_text(request: Message) -> None:
    reply(request, {**answer(request), "structuredContent": None})


def is_whole(request: Message) -> bool:
    return bool(request["params"]["arguments"]["settled"])


def die_half_way(request: Message) -> None:
    """The first process dies in the middle of its answer; the next one answers."""
    lived = Path(REST[0])
    if lived.exists():
        return reply(request, answer(request))
    lived.touch()
    write(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": answer(request)})[:60])
    os._exit(3)


def say_twice(request: Message) -> None:
    reply(request, answer(request))
    reply(request, answer(request, "RESTART"))


def among_noise(request: Message) -> None:
    write("Loading model…\n\n{'not': 'json'}\n")
    write(json.dumps({"jsonrpc": "2.0", "id": 9999, "result": {}}) + "\n")
    reply(request, answer(request))


def hold_back(request: Message) -> None:
    """Answer after half a second, or as soon as the client closes standard input."""
    select.select([0], [], [], 0.5)
    reply(request, answer(request))


CALLS: dict[str, Callable[[Message], None]] = {
    "stop": lambda request: reply(request, answer(request)),
    "text": as_text,
    "slow": hold_back,
    "hang": lambda request: os.kill(os.getpid(), signal.SIGSTOP),
    "silent": lambda request: None,
    "wrong-key": lambda request: reply(request, answer(request, key="somebody-else")),
    "garbage": lambda request: reply(request, {"content": [{"type": "text", "text": "It is fine, really."}]}),
    "endless": lambda request: write("x" * (3 << 20) + "\n"),
    "dies": die_half_way,
    "twice": say_twice,
    "noise": among_noise,
    "tool-error": lambda request: reply(
        request, {"content": [{"type": "text", "text": "no logs there"}], "isError": True}
    ),
    "no-tool": lambda request: write(
        json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32602, "message": "Unknown tool"}})
        + "\n"
    ),
    "changes": lambda request: reply(request, answer(request, "STOP" if is_whole(request) else "UNKNOWN")),
}


def initialised(request: Message) -> Message:
    return {
        "protocolVersion": request["params"]["protocolVersion"],
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "scripted", "version": "1"},
    }


def main() -> None:
    """Serve until standard input ends."""
    if MODE == "refuses":
        sys.exit("no licence")
    if MODE == "deaf":
        signal.pause()
    if MODE == "chatty":
        while True:
            write("still loading …\n")
    for line in sys.stdin:
        request = json.loads(line)
        match request.get("method"):
            case "initialize":
                reply(request, initialised(request))
            case "tools/list":
                reply(request, {"tools": [{"name": "attribute", "inputSchema": {"type": "object"}}]})
            case "tools/call":
                CALLS[MODE](request)


if __name__ == "__main__":
    main()
