"""`python bench/bare_app.py PORT_FILE BODY_FILE`: the least that an ASGI service can be, on uvicorn."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

BODY = Path(sys.argv[2]).read_bytes()


async def answer(_: Request) -> Response:
    return Response(BODY, media_type="application/json")


def main() -> None:
    # By name, or asyncio does not know that it is TCP, and answers wait for delayed acknowledgements (Nagle).
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        Path(sys.argv[1]).write_text(f"{listener.getsockname()[1]}\n")
        app = Starlette(routes=[Route("/v1/inquiries/{id}", answer)])
        config = uvicorn.Config(
            app, http="h11", timeout_keep_alive=75, lifespan="off", log_config=None, access_log=False
        )
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
