"""`python -m nvrx_slurm.lab.flow.stages.remote`: order on stdin, evidence on stdout, as JSON.

It runs where the job's processes are: beside them in a step of the job, or in the network of its batch host.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.journal.records import Record
from nvrx_slurm.lab.flow.stages.accounts import write_accounts
from nvrx_slurm.lab.flow.stages.deeds import Deed, Evidence, do
from nvrx_slurm.lab.flow.stages.revocation import Revocation, revoke
from nvrx_slurm.util.clock import Clock, SystemClock


class Account(Record, frozen=True, kw_only=True, tag="account"):
    """Write down what every process of the job in `folder` does on this node, into files below `out`."""

    folder: str
    out: str
    timeout_s: float
    node: str = ""


Order = Deed | Revocation | Account


class Answer(Record, frozen=True, kw_only=True):
    """The evidence, or why there is none."""

    evidence: Evidence | None = None
    error: str | None = None


def obey(order: Order, clock: Clock) -> Evidence:
    """Carry out an order on this machine. Raises FaultFailed."""
    match order:
        case Deed():
            return do(order, clock)
        case Revocation():
            return revoke(order, clock)
        case Account(folder=folder, out=out, timeout_s=timeout_s, node=node):
            files = asyncio.run(write_accounts(Path(folder), Path(out), timeout_s, node))
            return Evidence(at=clock.wall(), proof=f"written: {', '.join(map(str, files)) or 'nothing'}")


def main() -> None:
    """Obey one order."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    try:
        answer = Answer(evidence=obey(order, SystemClock()))
    except NvrxError as error:
        answer = Answer(error=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
