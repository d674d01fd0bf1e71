"""The training of examples/digits, restarted within its processes: numpy, TCP, and nothing else.

    nvrx-slurm run job.yaml
    python launch.py 4 digits.py --checkpoint-dir /tmp/digits --fault raise:1:60 --fault kill:2:90

What is dear (the interpreter, imports, the data) stays as it is. What a fault may have spoilt (connections, the
state of the training) is made anew each time that `training` is entered.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "digits"))

import faults
from group import join_group
from model import load_digits, new_state
from telling import tell_restarts, tell_start
from train import CHECKPOINT, Data, conclude, parse_arguments, record, restore, take_step

from nvrx_slurm.inprocess import CallWrapper, Wrapper


@Wrapper(soft_timeout=timedelta(seconds=5), hard_timeout=timedelta(seconds=15))
def training(call: CallWrapper, options: argparse.Namespace, data: Data, planned: faults.Faults) -> None:
    """From the last checkpoint to the last step, with the rank and the world that are in force now."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    state = new_state(options.seed)
    with closing(join_group(rank, world, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as group:
        restore(group, options.checkpoint_dir / CHECKPOINT, state)
        if rank == 0:
            tell_start(call, int(state["step"]))
        while state["step"] < options.steps:
            group.rest(options.step_time)
            loss = take_step(group, world, options, data, state)
            call.ping()
            if rank == 0:
                tell_restarts(call)
                with call.atomic():  # no restart cuts a checkpoint short
                    record(options, state, loss)
            planned.after(int(state["step"]))
    if rank == 0:
        conclude(options.checkpoint_dir, data, state, world)


def main() -> None:
    asked, others = faults.parser().parse_known_args()
    options = parse_arguments(others)
    options.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    training(options, load_digits(), faults.Faults(asked.fault))


if __name__ == "__main__":
    main()
