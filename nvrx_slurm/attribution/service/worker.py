"""`python -P -m nvrx_slurm.attribution.service.worker`: analyses one inquiry after the other.

The service starts it. Lines of JSON on standard input and output: a `Setup` first, then a `Result` for each `Job`.
It reads only below the roots, and takes no more memory than it may.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
from pathlib import Path
from typing import IO

import msgspec

from nvrx_slurm.attribution.analyze.analyzer import Analyzer
from nvrx_slurm.attribution.service.confinement import Roots, confine_by_hook, confine_by_kernel
from nvrx_slurm.attribution.service.jobs import Job, Result, Setup
from nvrx_slurm.errors import NvrxError
from nvrx_slurm.util.log import get_logger, set_up

log = get_logger("attrsvc.worker")


async def analyze(analyzer: Analyzer, job: Job) -> Result:
    """Never raises: an inquiry that cannot be analysed has a problem."""
    try:
        return Result(attribution=await analyzer.analyze(job.inquiry, timeout_s=job.timeout_s))
    except NvrxError as error:
        return Result(problem=str(error))
    except Exception as error:
        # What else failed on the way here, for want of memory say, is anybody's guess: it is not used again.
        log.exception("the analysis of %.200r failed", str(job.inquiry.key))
        why = "it took more memory than a worker may have" if isinstance(error, MemoryError) else repr(error)
        return Result(problem=f"the analysis failed: {why}", leaving=True)


def work(jobs: IO[bytes], answers: IO[bytes]) -> None:
    """Until there are no more jobs."""
    setup = msgspec.json.decode(jobs.readline(), type=Setup)
    # Data, not address space: logs that are mapped into memory, however long, cost none.
    resource.setrlimit(resource.RLIMIT_DATA, (setup.memory_bytes, setup.memory_bytes))
    rules = [Path(path) for path in setup.rules]
    roots = Roots(map(Path, setup.roots))
    confine_by_kernel(roots, rules)
    confine_by_hook(roots, rules)
    with asyncio.Runner() as runner:
        analyzer = Analyzer(rules=rules)
        for line in jobs:
            result = runner.run(analyze(analyzer, msgspec.json.decode(line, type=Job)))
            answers.write(msgspec.json.encode(result) + b"\n")
            answers.flush()
            if result.leaving:
                os._exit(1)
        runner.run(analyzer.close())


def main() -> None:
    set_up("attrsvc.worker")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which finishes what runs
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    with contextlib.suppress(BrokenPipeError):  # the service is gone
        work(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
