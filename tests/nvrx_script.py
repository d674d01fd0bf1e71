"""A training script like nvidia_resiliency_ext's own in-process examples: its import, its options, its faults.

    RANK=0 … nvrx_script.py FOLDER basic|optimal|advanced STEPS FAULTS

`basic` wraps all of the work, `optimal` the training loop alone. `advanced` has every callback, a tree of hosts with
two ranks each, of which one host is in reserve, and calls ping. FAULTS: the injector's fault for each rank, one part
for each iteration of the wrapper, as `WORKLOAD_EXC:1,SIGKILL:2+SIGSTOP:3`; none if empty.
"""

import datetime
import gc
import importlib.util
import os
import sys
from pathlib import Path
from typing import Optional

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch._dynamo  # DistributedDataParallel imports this late: a rank in reserve would import it in the function

FOLDER, FORM, STEPS = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
FAULTS = [dict(fault.split(":")[::-1] for fault in part.split("+")) for part in sys.argv[4].split(",") if part]
FIRST_RANK = os.environ["RANK"]
OPTIONS = {
    "store_kwargs": {"port": int(os.getenv("MASTER_PORT", 29500)) + 2, "timeout": datetime.timedelta(seconds=60)},
    "soft_timeout": datetime.timedelta(seconds=6),
    "hard_timeout": datetime.timedelta(seconds=8),
    "heartbeat_timeout": datetime.timedelta(seconds=20),
}
wrapped = inprocess.Wrapper(health_check=inprocess.health_check.CudaHealthCheck(), **OPTIONS)


def note(what):
    """Called from a thread other than the main one."""
    print(what, flush=True)


advanced_wrapped = inprocess.Wrapper(
    initialize=inprocess.initialize.RetryController(max_iterations=8, min_world_size=2),
    abort=inprocess.Compose(inprocess.abort.AbortTransformerEngine(), inprocess.abort.AbortTorchDistributed()),
    finalize=inprocess.finalize.ThreadedFinalize(
        timeout=datetime.timedelta(seconds=10), fn=note, args=(f"finalized on the process of rank {FIRST_RANK}",)
    ),
    health_check=inprocess.Compose(
        inprocess.health_check.CudaHealthCheck(), inprocess.health_check.FaultCounter(max_rank_faults=3)
    ),
    rank_assignment=inprocess.rank_assignment.Tree(
        [
            inprocess.rank_assignment.Layer(
                min_ranks=2, max_ranks=4, key_or_fn="root", flag=inprocess.rank_assignment.LayerFlag.RESERVE
            ),
            inprocess.rank_assignment.Layer(
                min_ranks=2,
                max_ranks=2,
                key_or_fn=lambda state: state.rank // 2,
                flag=inprocess.rank_assignment.LayerFlag.RESERVE,
            ),
        ]
    ),
    **OPTIONS | {"soft_timeout": datetime.timedelta(seconds=40), "hard_timeout": datetime.timedelta(seconds=60)},
)


def load_injector():
    """Load the injector by its file: importing its package needs NVIDIA's libraries."""
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


def loop(store, model, opt, call, where=None):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group(
        "gloo", where, store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=30)
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
    while step < STEPS or due:  # only the fault ends an iteration that has one
        injector.maybe_raise_workload_exception()
        inputs = torch.full((4, 8), float(step % 7))
        model.zero_grad()
        loss = (ddp(inputs) - 1).square().mean()
        loss.backward()
        opt.step()
        if step < STEPS:
            step += 1
        if FORM == "advanced":
            call.ping()
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


@advanced_wrapped
def advanced(call_wrapper: Optional[inprocess.CallWrapper] = None):  # noqa: UP045  as theirs
    model, opt = build()
    where = f"file://{FOLDER}/meet-{call_wrapper.iteration}"
    loop(None, model, opt, call_wrapper, where)
    gc.collect()  # frees the model of `loop`, which must not outlive the process group
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    match FORM:
        case "basic":
            basic()
        case "optimal":
            optimal(open_store(), *build())
        case "advanced":
            advanced()
