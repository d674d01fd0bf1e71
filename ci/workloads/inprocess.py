"""A small training under `nvrx_slurm.inprocess`: what it raises begins it again on all ranks, in the same processes.

It needs what the wrapper needs. A node's own Python may lack that; the one that runs the agents has it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from steps import ENV, RANK, Journal, hold_rank  # type: ignore[import-not-found]  # beside this file


def use_the_agents_python() -> None:
    """Go on as the same process under the interpreter of our parent, unless this one will do."""
    if find_spec("msgspec") is None:
        python = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")[0]
        os.execv(python, [os.fsdecode(python), *sys.argv])


use_the_agents_python()

from nvrx_slurm.inprocess import CallWrapper, Wrapper  # noqa: E402  only now it can be imported
from nvrx_slurm.workload import beat  # noqa: E402


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small training that restarts in process.")
    parser.add_argument("--step-time", type=float, default=0.02, metavar="SECONDS")
    parser.add_argument("--until", action="append", default=[], metavar="'EVENT key=value …'", help="as of steps.py")
    parser.add_argument("--fail-at", type=int, default=5, metavar="STEP")
    parser.add_argument("--ranks", default="1", help="which ranks fail, such as 0,1")
    parser.add_argument("--times", type=int, default=1, help="in how many first iterations they do, in each cycle")
    return parser.parse_args()


def train(options: argparse.Namespace, journal: Journal, call: CallWrapper | None = None) -> int:
    """Step until the journal has all that is waited for; returns the last step."""
    assert call is not None  # the wrapper gives it
    fails = call.iteration < options.times and str(RANK) in options.ranks.split(",")
    step = 0
    while step < options.fail_at or not journal.has_all():
        time.sleep(options.step_time)
        step += 1
        call.ping()
        beat(step=step)
        if fails and step == options.fail_at:
            raise RuntimeError(f"rank {RANK} was told to fail in iteration {call.iteration}")
    return step


def main() -> None:
    options = parse()
    journal, pid = Journal(options.until), os.getpid()
    with hold_rank():
        step = Wrapper()(train)(options, journal)
    print(f"rank {RANK} of cycle {ENV['NVRX_CYCLE']} is done after step {step}, in process {pid}")


if __name__ == "__main__":
    main()
