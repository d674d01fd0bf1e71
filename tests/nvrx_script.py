"""A training in the manner of nvidia_resiliency_ext's own in-process examples: its import, its options, its faults.

    RANK=0 … nvrx_script.py FOLDER basic|optimal STEPS FAULTS

`basic` wraps all of the work, `optimal` the training loop alone. FAULTS: which of its injector's faults befall which
rank, an iteration of the wrapper after the other, as `WORKLOAD_EXC:1,SIGKILL:2+SIGSTOP:3`.
"""

import datetime
import importlib.util
import os
import sys
from pathlib import Path
from typing import Optional

import nvidia_resiliency_ext.inprocess as inprocess
import torch

FOLDER, FORM, STEPS = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
FAULTS = [dict(fault.split(":")[::-1] for fault in part.split("+")) for part in sys.argv[4].split(",")]
FIRST_RANK = os.environ["RANK"]
wrapped = inprocess.Wrapper(
    store_kwargs={"port": int(os.getenv("MASTER_PORT", 29500)) + 2, "timeout": datetime.timedelta(seconds=60)},
    health_check=inprocess.health_check.CudaHealthCheck(),
    soft_timeout=datetime.timedelta(seconds=6),
    hard_timeout=datetime.timedelta(seconds=8),
    heartbeat_timeout=datetime.timedelta(seconds=20),
)


def load_injector():
    """By its file: the package around it needs NVIDIA's libraries."""
    (package,) = importlib.util.find_spec("nvidia_resiliency_ext").submodule_search_locations
    spec = importlib.util.spec_from_file_location("injector", f"{package}/inprocess/tools/inject_fault.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


injector = load_injector()


def build():
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.001)


def open_store():
    return torch.distributed.TCPStore(
        host_name=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]) + 1,
        world_size=int(os.environ["WORLD_SIZE"]),
        is_master=int(os.environ["RANK"]) == 0,
        multi_tenant=True,
        wait_for_workers=True,
    )


def loop(store, model, opt, call):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=10)
    )
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    step, checkpoint = 0, FOLDER / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
        step = saved["step"]
    due = FAULTS[call.iteration] if call.iteration < len(FAULTS) else {}
    if fault := due.get(FIRST_RANK):
        print(f"iteration {call.iteration}: {fault} on rank {FIRST_RANK}", flush=True)
        injector.dispatch_fault_injection(injector.Fault[fault], 0.1, None)
    while step < STEPS or due:  # an iteration with a fault ends by it
        injector.maybe_raise_workload_exception()
        inputs = torch.full((4, 8), float(step % 7))
        model.zero_grad()
        loss = (ddp(inputs) - 1).square().mean()
        loss.backward()
        opt.step()
        if step < STEPS:
            step += 1
        if rank == 0 and step % 5 == 0 and not due:
            with call.atomic():
                torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step}, checkpoint)
    if rank == 0:
        print(f"done in iteration {call.iteration} with {world} ranks, loss {loss.item():.6f}", flush=True)


@wrapped
def basic(call_wrapper: Optional[inprocess.CallWrapper] = None):  # noqa: UP045  as theirs
    model, opt = build()
    loop(open_store(), model, opt, call_wrapper)


@wrapped
def optimal(base_store, model, opt, call_wrapper: Optional[inprocess.CallWrapper] = None):  # noqa: UP045  as theirs
    loop(torch.distributed.PrefixStore(str(call_wrapper.iteration), base_store), model, opt, call_wrapper)


if __name__ == "__main__":
    if FORM == "basic":
        basic()
    else:
        optimal(open_store(), *build())
