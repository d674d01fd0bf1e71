"""A worker whose answers a test writes: what the first path of an inquiry holds. A FIFO holds it until the test does.

`STOP`, `RESTART`, `UNKNOWN` are verdicts; `problem …` is one; `die`, `garbage` and `leave` are what they say.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec

from nvrx_slurm.attribution.service.jobs import Job, Result, Setup
from nvrx_slurm.journal.verdicts import Attribution, Verdict


def answer(job: Job) -> Result:
    text = Path(job.inquiry.paths[0]).read_text().strip()
    if text == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if text.startswith("problem"):
        return Result(problem=text)
    if text == "leave":
        return Result(problem="too much memory", leaving=True)
    verdict, _, fault = text.partition(" ")
    return Result(attribution=Attribution(source="lib", verdict=Verdict(verdict), fault=fault or "unknown"))


def main() -> None:
    msgspec.json.decode(sys.stdin.buffer.readline(), type=Setup)
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Job)
        garbage = Path(job.inquiry.paths[0]).is_file() and Path(job.inquiry.paths[0]).read_text() == "garbage"
        line = b"what?" if garbage else msgspec.json.encode(answer(job))
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
