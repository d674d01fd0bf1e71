"""The source `mcp`: an MCP server over stdio, which offers the tool `attribute`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from nvrx_slurm.attribution.http_client import need
from nvrx_slurm.attribution.sources.base import MOST_TEXT, look_twice, read_answer, verdict_of
from nvrx_slurm.errors import SourceError
from nvrx_slurm.journal.verdicts import Attribution, Inquiry

if TYPE_CHECKING:
    from nvrx_slurm.attribution.sources.mcp_session import McpSession

TOOL = "attribute"


def default_command(rules: Sequence[str] = ()) -> tuple[str, ...]:
    """The MCP server of nvrx-slurm, run by this Python."""
    options = [option for rule in rules for option in ("--rules", rule)]
    return (sys.executable, "-P", "-m", "nvrx_slurm", "mcp", *options)


class McpSource:
    """Calls the tool `attribute` with `inquiry` and `settled`; its result is what `POST /v1/inquiries` answers.

    One server is started, by `open` or the first ask, and kept. One that failed half way is ended, and the next ask
    starts another.
    """

    name = "mcp"

    def __init__(self, command: Sequence[str], *, settle_s: float) -> None:
        self._command, self._settle_s = command, settle_s
        self._session: McpSession | None = None
        self._starting = asyncio.Lock()

    async def open(self) -> None:
        await self._started()

    async def ask(self, inquiry: Inquiry, *, settled: asyncio.Event, timeout_s: float) -> Attribution:
        """The server's verdict. Raises SourceError, and UsageError where the SDK is not installed."""

        async def look(whole: bool) -> Attribution:
            session = await self._started()
            arguments = {"inquiry": msgspec.to_builtins(inquiry, str_keys=True), "settled": whole}
            result = await session.call(TOOL, arguments)
            text = "".join(getattr(block, "text", "") for block in result.content)
            if result.is_error:
                raise SourceError(f"the MCP server's tool {TOOL!r} failed: {text[:MOST_TEXT]}")
            # The same answer may come as structured content, as JSON text, or as both.
            structured: Any = result.structured_content
            return verdict_of(read_answer(msgspec.json.encode(structured) if structured else text, inquiry.key))

        return await look_twice(look, inquiry, settled=settled, settle_s=min(self._settle_s, timeout_s))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _started(self) -> McpSession:
        async with self._starting:
            if self._session is None or self._session.is_over:
                await asyncio.to_thread(need, "mcp")  # a good second of imports: others go on meanwhile
                from nvrx_slurm.attribution.sources.mcp_session import McpSession

                self._session = McpSession(self._command)
                await self._session.started()
            return self._session
