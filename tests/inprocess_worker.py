"""A worker whose function is wrapped. It comes to the test's gate once, and each byte from there is an order for the
function: `RAISE`, `HOLD` (the GIL, in native code), or the exit code to end with.

argv: the gate's port, and more words: `beats` (a step whenever an order has come), `slow:SECONDS` (to finalize),
`exits` (by SystemExit, where the code is not 0), `hasty` (soft timeout 1 s, hard 2 s), `marks:FOLDER` (a file
ITERATION.RANK whenever the function begins), `tells:COUNT:RANKS` (restarts of so many ranks that never happened).
"""

import ctypes
import os
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path

RAISE, HOLD = 255, 254
NAMES = "RANK WORLD_SIZE NVRX_CYCLE NVRX_GENERATION NVRX_REPLICA NVRX_NODE NVRX_STORE_FILE NVRX_BEAT_SOCKET"
GATE: socket.socket


def come_to_the_gate(port: int) -> None:
    global GATE
    GATE = socket.create_connection(("127.0.0.1", port))
    known = [f"{name}={os.environ[name]}" for name in NAMES.split()]
    GATE.sendall("\0".join([f"PID={os.getpid()}", *known]).encode() + b"\n")


def obey(call=None) -> int:
    """Until an order comes. Returns the exit code that was ordered."""
    from nvrx_slurm.workload import beat

    if "marks" in OPTIONS:
        Path(OPTIONS["marks"], f"{call.iteration}.{os.environ['RANK']}").touch()
    if "beats" in OPTIONS:
        beat(step=call.iteration)
    said = GATE.recv(1)
    order = said[0] if said else 9
    if order == RAISE:
        raise RuntimeError(f"told to fail in iteration {call.iteration}")
    if order == HOLD:
        ctypes.PyDLL(None).sleep(1000)
    if "exits" in OPTIONS and order:
        sys.exit(order)
    return order


def linger(state: object) -> None:
    threading.Event().wait(float(OPTIONS["slow"]))


def wrapped_obey() -> int:
    from nvrx_slurm.inprocess import CallWrapper, Finalize, Wrapper

    class Lingers(Finalize):
        def __call__(self, state):
            linger(state)
            return state

    obey.__annotations__["call"] = CallWrapper
    finalize = Lingers() if "slow" in OPTIONS else None
    return Wrapper(finalize=finalize, **(HASTY if "hasty" in OPTIONS else {}))(obey)()


def tell_of_restarts(count: int, ranks: int) -> None:
    """Hand-made ones: what a group of that size would tell."""
    from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord
    from nvrx_slurm.inprocess.journal import tell_agent
    from nvrx_slurm.inprocess.timeline import Phase, RankTimeline, Restart

    phases = dict.fromkeys(Phase, 0.001)
    timelines = tuple(RankTimeline(member=rank, rank=rank, host="h", phases=phases) for rank in range(ranks))
    record = InterruptionRecord(0, Interruption.EXCEPTION, "ValueError: no such layer: 49", "h")
    for iteration in range(1, count + 1):
        told = {"iteration": iteration, "world_size": ranks, "active_world_size": ranks, "missing": ()}
        tell_agent(Restart(at=0.0, group="g", call=0, **told, records=(record,), ranks=timelines))


HASTY = {
    "soft_timeout": timedelta(seconds=1),
    "hard_timeout": timedelta(seconds=2),
    "monitor_thread_interval": timedelta(seconds=0.1),
    "monitor_process_interval": timedelta(seconds=0.1),
    "progress_watchdog_interval": timedelta(seconds=0.1),
    "termination_grace_time": timedelta(seconds=1),
}
OPTIONS = {name: value for name, _, value in (word.partition(":") for word in sys.argv[2:])}

if __name__ == "__main__":
    if "tells" in OPTIONS:
        tell_of_restarts(*map(int, OPTIONS["tells"].split(":")))
    come_to_the_gate(int(sys.argv[1]))
    if "tells" in OPTIONS:
        said = GATE.recv(1)
        sys.exit(said[0] if said else 9)
    sys.exit(wrapped_obey())
