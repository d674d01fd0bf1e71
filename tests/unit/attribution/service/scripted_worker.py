"""A worker whose answers a test writes into the first path of an inquiry. If that is a FIFO, the worker waits for the
test.

`STOP`, `RESTART`, `UNKNOWN` are verdicts; `problem …` is a problem; `die`, `garbage`, `nested` (brackets in brackets)
and `leave` do what their names say.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec

from nvrx_slurm.attribution.service.workers import AnalysisJob, WorkerResult, WorkerSetup
from nvrx_slurm.journal.verdicts import Attribution, Verdict

INSTEAD = {"garbage": b"what?", "nested": b'{"a":' + b"[" * 100_000}


def answer(job: AnalysisJob) -> WorkerResult:
    text = Path(job.inquiry.paths[0]).read_text().strip()
    if text == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if text.startswith("problem"):
        return WorkerResult(problem=text)
    if text == "leave":
        return WorkerResult(problem="too much memory", leaving=True)
    verdict, _, fault = text.partition(" ")
    return WorkerResult(attribution=Attribution(source="lib", verdict=Verdict(verdict), fault=fault or "unknown"))


def main() -> None:
    msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSetup)
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=AnalysisJob)
        log = Path(job.inquiry.paths[0])
        instead = INSTEAD.get(log.read_text()) if log.is_file() else None  # a FIFO is read once
        line = instead or msgspec.json.encode(answer(job))
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
