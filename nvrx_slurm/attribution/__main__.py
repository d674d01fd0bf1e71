"""`python -m nvrx_slurm.attribution`: the broker's process, which the controller starts; lines of JSON in and out."""

from __future__ import annotations

from nvrx_slurm.util import garbage

if __name__ == "__main__":
    garbage.pause()

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec

from nvrx_slurm.attribution.broker import DecisionListener, SourceBroker
from nvrx_slurm.attribution.sources import sources_of
from nvrx_slurm.errors import MalformedRecord, NvrxError, UsageError
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.model import AttributionSpec
from nvrx_slurm.jobspec.plan import plan_from_json
from nvrx_slurm.journal.verdicts import AgentFindings, Attribution, FailureKey, Inquiry, VerdictRecord, Wire
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.decoding import decode_json
from nvrx_slurm.util.files import JobFiles
from nvrx_slurm.util.log import get_logger, set_up
from nvrx_slurm.util.processes import die_with
from nvrx_slurm.util.tasks import standard_streams

log = get_logger("attribution")

# An inquiry names every node and process of a cycle.
LINE_BYTES = 16 << 20


class ControllerMessage(Wire, frozen=True, kw_only=True):
    """A line from the controller: one of `ask` (with `settled` as a yes or no), `settled`, `found`, `judged`."""

    ask: Inquiry | None = None
    settled: FailureKey | bool = False
    found: AgentFindings | None = None
    judged: VerdictRecord | None = None


def main() -> None:
    """Serve until standard input ends. Raises UsageError where the job folder has no plan, ForgedRecord."""
    die_with(os.getppid(), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller
    set_up("attribution")
    env.take_secrets()
    folder = env.job_folder()
    if folder is None:
        raise UsageError(
            "the attribution process is started by the controller, with NVRX_JOB_FOLDER in its environment"
        )
    job = JobFiles(folder)
    try:
        plan = plan_from_json(job.read_plan_json(env.plan_digest())).fault_tolerance.attribution
    except (OSError, MalformedRecord) as error:
        raise UsageError(f"{job.plan_path} does not say which sources of attribution to ask: {error}") from None

    async def until_the_end() -> None:
        await serve(plan, folder)
        os._exit(0)  # the loop's own end would wait for its threads, and one may hang on a file system

    asyncio.run(until_the_end())


async def serve(plan: AttributionSpec, folder: Path) -> None:
    """Answer each line of standard input, until it ends."""
    clock = SystemClock()
    reader, writer = await standard_streams(LINE_BYTES)

    async def answered(key: FailureKey, attribution: Attribution) -> None:
        writer.write(msgspec.json.encode({"answer": {"key": key, "attribution": attribution}}) + b"\n")
        await writer.drain()

    def afterwards() -> DecisionListener:
        from nvrx_slurm.attribution.notify import Notifier

        return Notifier(plan, folder, clock=clock)

    sources = sources_of(plan, folder=folder, clock=clock)
    broker = SourceBroker(sources, afterwards, timeout_s=plan.timeout, answered=answered)
    broker.open()
    while True:
        # Before the read: what is not read yet stays in the pipe.
        await broker.room()
        try:
            line = await reader.readline()
        # asyncio has dropped what it had of the line. What still comes of it is malformed, and logged below.
        except ValueError:
            log.error("a line of more than %d bytes is not read", LINE_BYTES)
            continue
        if not line:
            break
        try:
            message = decode_json(ControllerMessage, line, "the line")
            if message.ask is not None:
                broker.ask(message.ask, settled=message.settled is True)
            if isinstance(message.settled, FailureKey):
                broker.settled(message.settled)
            if message.found is not None:
                broker.found(message.found)
            if message.judged is not None:
                broker.judged(message.judged)
        except MalformedRecord as error:
            log.error("not a line for the broker (%s): %.120r", error, line)
    await broker.close()


if __name__ == "__main__":
    garbage.resume()
    try:
        main()
    except NvrxError as error:
        print(f"nvrx-slurm attribution: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
