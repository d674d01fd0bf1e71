"""A rank of two that uses torch.distributed: `torch_rank.py RANK FOLDER WAY…`. Rank 0 prints the outcome of each way.

In each way, which is a function below, rank 1 takes part once, and is then alive and silent from rank 0's point of
view; in `both_abort_at_once` it does the same as rank 0.
"""

from __future__ import annotations

import datetime
import gc
import itertools
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # otherwise the first DistributedDataParallel imports it and stays referenced
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nvrx_slurm.inprocess.abort import AbortTorchDistributed, close_cut_connections, drop_aborted_groups
from nvrx_slurm.inprocess.exception import TimeoutError
from nvrx_slurm.inprocess.state import FrozenState
from nvrx_slurm.inprocess.store_wait import free_main_thread, mend_stores

STATE = FrozenState(rank=0, world_size=2)
LONG = datetime.timedelta(minutes=30)
DEADLINE_S = 60.0


def meet(rank: int, path: str) -> dist.ProcessGroup:
    """Makes two groups of both ranks and uses both. Returns the second one."""
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2, timeout=LONG)
    second = dist.new_group([0, 1])
    for group in (None, second):
        dist.all_reduce(torch.ones(4), group=group)
    return second


def in_a_kernel_wait(main: int) -> bool:
    """Whether the main thread is in a call of torch.distributed and waits there."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    if not str(frame.f_globals["__name__"]).startswith("torch.distributed"):
        return False
    return Path(f"/proc/self/task/{main}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def stuck_in(collective: Callable[[], object]) -> dict[str, object]:
    """What a collective without the other rank raises, when another thread aborts it."""
    aborted: list[str] = []
    main = threading.get_native_id()

    def abort() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not in_a_kernel_wait(main):
            assert time.monotonic() < deadline
        AbortTorchDistributed()(STATE)
        aborted.append("aborted")

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        collective()
        outcome = "returned"
    except RuntimeError as error:
        outcome = f"{type(error).__name__}: {error}"
    thread.join()
    return {"outcome": outcome, "aborted": aborted, "initialized": dist.is_initialized()}


def all_reduce(second: dist.ProcessGroup, folder: str) -> dict[str, object]:
    return stuck_in(lambda: dist.all_reduce(torch.ones(4)))


def all_reduce_in_the_second_group(second: dist.ProcessGroup, folder: str) -> dict[str, object]:
    return stuck_in(lambda: dist.all_reduce(torch.ones(4), group=second))


def large_all_gather(second: dist.ProcessGroup, folder: str) -> dict[str, object]:
    mine = torch.ones(1 << 22)
    return stuck_in(lambda: dist.all_gather([torch.empty_like(mine) for _ in range(2)], mine))


def recv(second: dist.ProcessGroup, folder: str) -> dict[str, object]:
    return stuck_in(lambda: dist.recv(torch.ones(4), src=1))


def barrier(second: dist.ProcessGroup, folder: str) -> dict[str, object]:
    return stuck_in(dist.barrier)


def wait_for_async_work(second: dist.ProcessGroup, folder: str) -> dict[str, object]:
    works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in (None, second)]
    return stuck_in(lambda: dist.all_reduce(torch.ones(4))) | {"works": len(works)}


def again_and_again(second: dist.ProcessGroup, folder: str) -> dict[str, object]:
    """Ten times: stuck, aborted, and then working in a group of its own in the same process."""
    first = stuck_in(lambda: dist.all_reduce(torch.ones(4)))
    sums = []
    for place in range(10):
        store = dist.FileStore(f"{folder}/again-{place}", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        ones = torch.ones(4)
        dist.all_reduce(ones)
        sums.append(ones.sum().item())
        AbortTorchDistributed()(STATE)
    return first | {"sums": sums, "initialized": dist.is_initialized()}


def others_connections(second: dist.ProcessGroup, folder: str) -> dict[str, object]:
    """A store of torch, and a connection of this process to itself, used after an abort."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        with mine, theirs:
            stuck = stuck_in(lambda: dist.all_reduce(torch.ones(4)))
            store.set("key", "value")
            mine.sendall(b"ping")
            return stuck | {"store": store.get("key").decode(), "socket": theirs.recv(4).decode()}


def reducer_that_ends_last(second: dist.ProcessGroup, folder: str) -> dict[str, object]:
    """The threads of a group of Gloo: after the function has aborted and dropped it, and after
    `drop_aborted_groups`."""
    stuck = stuck_in(lambda: dist.all_reduce(torch.ones(4)))
    drop_aborted_groups()
    before = gloo_threads()
    store = dist.FileStore(f"{folder}/reducer", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    AbortTorchDistributed()(STATE)
    del model
    kept = gloo_threads() - before
    drop_aborted_groups()
    return stuck | {"kept": kept > 0, "then": gloo_threads() - before}


def gloo_threads() -> int:
    return [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")].count("pt_gloo_runloop")


class Unending(dist.ProcessGroup):  # type: ignore[misc]
    """A group whose abort does not return."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def abort(self) -> None:
        threading.Event().wait()

    def getBackendName(self) -> str:
        return "unending"


def abort_that_hangs(second: dist.ProcessGroup, folder: str) -> dict[str, object]:
    dist.distributed_c10d._world.pg_names[Unending()] = "unending"
    began = time.monotonic()
    try:
        AbortTorchDistributed(timeout=datetime.timedelta(seconds=0.2))(STATE)
    except TimeoutError as error:
        return {"outcome": str(error), "in time": time.monotonic() - began < DEADLINE_S}
    return {"outcome": "returned"}


def freed_from(wait: Callable[[], object]) -> str:
    """How a wait of the main thread ends, while another thread frees it."""
    is_over = threading.Event()

    def free() -> None:
        while not is_over.is_set():
            free_main_thread(is_over.is_set)

    thread = threading.Thread(target=free)
    thread.start()
    try:
        return f"returned {wait()!r}"
    except dist.DistNetworkError as error:
        return type(error).__name__
    finally:
        is_over.set()
        thread.join()


def waits_for_stores(second: dist.ProcessGroup, folder: str) -> dict[str, object]:
    """Waits for a key, twice; for a group whose other rank does not join; and for the other client of a store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.destroy_process_group()
    other = dist.TCPStore("127.0.0.1", store.port)
    before, outcomes = open_files(), []
    socket.setdefaulttimeout(DEADLINE_S)  # with a default timeout Python makes the sockets that it wraps non-blocking
    for wait in (
        lambda: store.get("key"),
        lambda: store.wait(["key"], LONG),
        lambda: dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=LONG),
        lambda: dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=LONG),
    ):
        outcomes.append(freed_from(wait))
        AbortTorchDistributed()(STATE)
        other.set("key of the other", "")  # a connection on which no call waits
        mend_stores()
        outcomes.append(f"then {store.add('tried', 1)}")
    socket.setdefaulttimeout(None)
    return {"outcomes": outcomes, "leaked": left_open(before)}


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def left_open(before: int) -> int:
    """How many more files are open than before, after the threads of stores and groups have closed theirs."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        gc.collect()
        left = max(0, open_files() - before)  # fewer, if some files of the group before were still open
        if not left or time.monotonic() > deadline:
            return left
        threading.Event().wait(0.05)


def waits_for_another_server(second: dist.ProcessGroup, folder: str) -> dict[str, object]:
    """Waits for a server that sends nothing to an unknown client, and answers this one after that."""
    dist.destroy_process_group()
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()

        def answer() -> None:
            server.accept()[0].recv(1)
            theirs.sendall(b"ping")

        with mine, theirs:
            threading.Thread(target=answer).start()
            return {"outcome": freed_from(lambda: mine.recv(4))}


def both_abort_at_once(second: dist.ProcessGroup, folder: str) -> dict[str, object]:
    """Both ranks abort their training at the same time, twenty times. They close nothing before both are out."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    gc.freeze()  # objects that torch has loaded: otherwise each collection would look through them
    outcomes = []
    for place in range(20):
        store = dist.FileStore(f"{folder}/both-{place}", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=LONG)
        outcomes.append(trained_until_aborted(steps=5))
        drop_aborted_groups()
        store.set(f"out {rank}", "")
        store.get(f"out {1 - rank}")
        close_cut_connections()
    return {"outcomes": outcomes}


def trained_until_aborted(steps: int) -> str:
    """Trains until another thread aborts it, which it does after `steps` steps."""
    model, are_done = DistributedDataParallel(torch.nn.Linear(8, 1)), threading.Event()

    def abort() -> None:
        are_done.wait(DEADLINE_S)
        AbortTorchDistributed()(STATE)

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        for step in itertools.count():
            if step == steps:
                are_done.set()
            model(torch.ones(4, 8)).sum().backward()
    except RuntimeError as error:
        return type(error).__name__
    finally:
        thread.join()
        del model
        gc.collect()
    return "returned"


def main() -> None:
    rank, folder, ways = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    kept = []
    for way in ways:
        second = meet(rank, f"{folder}/{way}")
        if way == "both_abort_at_once" and rank == 1:
            both_abort_at_once(second, folder)
        elif rank == 0:
            print(json.dumps(globals()[way](second, folder)), flush=True)
        else:
            kept.append((dist.group.WORLD, second))  # its connections stay open
            dist.destroy_process_group()
    if rank == 1:
        signal.pause()


if __name__ == "__main__":
    main()
