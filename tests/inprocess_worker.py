"""A worker whose function is wrapped. It connects to the test's gate once; each byte that it receives there is an
order for the function: `RAISE`, `HOLD` (the GIL, in native code), or the exit code to end with.

argv: the gate's port, and options: `once` (no orders: after one step rank 1 fails; after the next step all end),
`slow:SECONDS` (Finalize takes so long), `unfit:RANK` (Finalize raises on that rank), `exits` (by SystemExit, where
the code is not 0), `hasty` (short timeouts), `marks:FOLDER` (a file ITERATION.RANK whenever the function begins),
`tells:COUNT:RANKS` (report COUNT restarts of RANKS ranks, which never happened).
"""

import ctypes
import os
import select
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
    """Wait for an order and obey it. Returns the exit code that was ordered."""
    if "marks" in OPTIONS:
        Path(OPTIONS["marks"], f"{call.iteration}.{os.environ['RANK']}").touch()
    if "once" in OPTIONS:
        return fail_once(call)
    said = GATE.recv(1)
    order = said[0] if said else 9
    if order == RAISE:
        raise RuntimeError(f"told to fail in iteration {call.iteration}")
    if order == HOLD:
        ctypes.PyDLL(None).sleep(1000)
    if "exits" in OPTIONS and order:
        sys.exit(order)
    return order


def fail_once(call) -> int:
    from nvrx_slurm.workload import beat

    beat(step=call.iteration)
    if call.iteration:
        return 0
    if os.environ["RANK"] == "1":
        raise RuntimeError("told to fail once")
    return threading.Event().wait()


def wrapped_obey() -> int:
    from nvrx_slurm.inprocess import CallWrapper, Finalize, Wrapper

    class Lingers(Finalize):
        def __call__(self, state):
            if OPTIONS.get("unfit") == os.environ["RANK"]:
                raise RuntimeError("cannot be finalized")
            threading.Event().wait(float(OPTIONS.get("slow", 0)))
            return state

    obey.__annotations__["call"] = CallWrapper
    finalize = Lingers() if OPTIONS.keys() & {"slow", "unfit"} else None
    return Wrapper(finalize=finalize, **(HASTY if "hasty" in OPTIONS else {}))(obey)()


def tell_of_restarts(count: int, ranks: int) -> None:
    """Send made-up restart records, as a group of that size would. Each is sent once the agent has room for it."""
    from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord
    from nvrx_slurm.inprocess.timeline import RankTimeline, Restart, RestartPart, send_to_agent

    phases = dict.fromkeys(RestartPart, 0.001)
    timelines = tuple(RankTimeline(member=rank, rank=rank, host="h", phases=phases) for rank in range(ranks))
    record = InterruptionRecord(0, Interruption.EXCEPTION, "ValueError: no such layer: 49", "h")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.connect(os.environ["NVRX_BEAT_SOCKET"])
        for iteration in range(1, count + 1):
            told = {"iteration": iteration, "world_size": ranks, "active_world_size": ranks, "missing": ()}
            select.select([], [channel], [])
            send_to_agent(Restart(at=0.0, group="g", call=0, **told, records=(record,), ranks=timelines))


HASTY = {
    "soft_timeout": timedelta(seconds=1.5),
    "hard_timeout": timedelta(seconds=5),
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
