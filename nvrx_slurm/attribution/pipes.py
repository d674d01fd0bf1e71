"""Standard input and output as streams of lines, for a process that exchanges JSON with its parent."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio import StreamReader, StreamWriter


async def standard_streams(line_bytes: int) -> tuple[StreamReader, StreamWriter]:
    """Standard input and output of this process; what else prints on the latter goes to standard error.

    A line longer than `line_bytes` is a ValueError of the reader. The writer's `drain` ends when all is in the pipe.
    """
    loop = asyncio.get_running_loop()
    said = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    reader = StreamReader(limit=line_bytes)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(lambda: asyncio.streams.FlowControlMixin(loop=loop), said)
    transport.set_write_buffer_limits(high=0)
    return reader, StreamWriter(transport, protocol, None, loop)
