"""One rank of a wrapped function. Usage: inprocess_rank.py nvrx-slurm|NVRx '{"interval_s": …, …}', with RANK etc.

    out   entered <iteration> <stamp>    the function was called; seconds of the machine's monotonic clock
          raised <stamp>                 it is about to raise
          pings <seconds>                of a million
    in    raise | return | ping

Both sides have torch imported, and the function looks for its input a thousand times a second, as a training loop
returns to Python between its kernels.
"""

import json
import os
import select
import sys
import time
from datetime import timedelta
from typing import Any

import torch  # noqa: F401  a collection of garbage over all of it is a part of a restart

INTERVALS = ("monitor_thread", "monitor_process", "heartbeat", "progress_watchdog")
PINGS = {"nvrx-slurm": 1_000_000, "NVRx": 5_000}


def main() -> None:
    side, given = sys.argv[1], json.loads(sys.argv[2])
    wrapper, call_wrapper = _nvrx_slurm(given) if side == "nvrx-slurm" else _nvrx(given)

    def train(call: Any = None) -> None:  # NVRx binds the arguments before it fills it in
        say(f"entered {call.iteration} {time.monotonic()!r}")
        while (order := next_order()) != "return":
            if order == "raise":
                say(f"raised {time.monotonic()!r}")
                raise RuntimeError("bench")
            if order == "ping":
                say(f"pings {pings(call, PINGS[side])!r}")

    train.__annotations__["call"] = call_wrapper  # by which either side finds the argument that it fills in
    wrapper(train)()


def _nvrx_slurm(given: dict[str, Any]) -> tuple[Any, Any]:
    from nvrx_slurm.inprocess import CallWrapper, Wrapper
    from nvrx_slurm.inprocess.store_redis import RedisStore

    store = {"url": given["url"], "password_file": given["password_file"]}
    return Wrapper(store_factory=RedisStore, store_kwargs=store, **times(given)), CallWrapper


def _nvrx(given: dict[str, Any]) -> tuple[Any, Any]:
    from nvidia_resiliency_ext.inprocess import CallWrapper, Wrapper

    return Wrapper(**times(given)), CallWrapper


def times(given: dict[str, Any]) -> dict[str, Any]:
    """Both sides call their options the same; what is not given stays at its default, and so do all timeouts."""
    found: dict[str, Any] = {}
    if "interval_s" in given:
        found |= {f"{name}_interval": timedelta(seconds=given["interval_s"]) for name in INTERVALS}
    if "last_call_s" in given:
        found["last_call_wait"] = timedelta(seconds=given["last_call_s"])
    return found


def pings(call: Any, count: int) -> float:
    """Seconds of a million."""
    began = time.perf_counter()
    for _ in range(count):
        call.ping()
    return (time.perf_counter() - began) / count * 1e6


def next_order() -> str:
    """The next line of the input, or nothing for now; its end means return."""
    while not select.select([0], [], [], 0.001)[0]:
        pass
    return os.read(0, 64).decode().strip() or "return"


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main()
