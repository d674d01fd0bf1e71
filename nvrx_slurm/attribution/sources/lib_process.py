"""`python -m nvrx_slurm.attribution.sources.lib_process`: the rules, in the process that the source `lib` starts.

It is told its rules in the first line, then one question a line; it answers each in a line, as it is done.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from nvrx_slurm.attribution.analyze.analyzer import Analyzer
from nvrx_slurm.attribution.pipes import standard_streams
from nvrx_slurm.attribution.sources.lib import LINE_BYTES, Found, Question, Settings
from nvrx_slurm.errors import NvrxError
from nvrx_slurm.util.log import set_up
from nvrx_slurm.util.threads import in_thread


async def serve() -> None:
    """Answer until the input ends."""
    reader, writer = await standard_streams(LINE_BYTES)
    settings = msgspec.json.decode(await reader.readline(), type=Settings)
    analyzer, problem = _analyzer(settings)
    if analyzer is not None:
        in_thread(analyzer.warm_up, "compile rules")
    running: set[asyncio.Task[None]] = set()

    async def answer(question: Question) -> None:
        found = await _found(analyzer, question) if analyzer else Found(number=question.number, problem=problem)
        writer.write(msgspec.json.encode(found) + b"\n")
        await writer.drain()

    while line := await reader.readline():
        _start(answer(msgspec.json.decode(line, type=Question)), running)
    os._exit(0)  # nobody is left to hear what still runs


def _analyzer(settings: Settings) -> tuple[Analyzer | None, str]:
    try:
        return Analyzer(rules=[Path(rule) for rule in settings.rules], llm=settings.llm), ""
    except NvrxError as error:
        return None, str(error)


async def _found(analyzer: Analyzer, question: Question) -> Found:
    try:
        attribution = await analyzer.analyze(question.inquiry, timeout_s=question.timeout_s)
        return Found(number=question.number, attribution=attribution)
    except NvrxError as error:
        return Found(number=question.number, problem=str(error))


def _start(work: Coroutine[Any, Any, None], running: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    running.add(task)
    task.add_done_callback(running.discard)


if __name__ == "__main__":
    set_up("attribution")
    asyncio.run(serve())
