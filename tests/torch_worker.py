"""A rank of a torch process group over gloo: all-reduces forever, and reports its steps."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from nvrx_slurm import workload

dist.init_process_group("gloo")
tensor, step = torch.ones(1000), 1_000_000 * int(os.environ["NVRX_CYCLE"])
while True:
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()
    step += 1
    workload.beat(step=step)
