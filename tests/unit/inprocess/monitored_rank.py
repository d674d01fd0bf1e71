"""A rank as its monitor sees it: a process that evaluates the lines that the test sends, and prints each result.

It gets the monitor's options as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from nvrx_slurm.inprocess import barriers
from nvrx_slurm.inprocess.attribution import Interruption
from nvrx_slurm.inprocess.barriers import MemberProcess, pack
from nvrx_slurm.inprocess.ledger import Lost
from nvrx_slurm.inprocess.monitor import MonitorOptions, MonitorProcess
from nvrx_slurm.inprocess.progress import ProgressStamps
from nvrx_slurm.inprocess.store_redis import RedisStore
from nvrx_slurm.util.processes import started_ticks
from tests.unit.inprocess.flawed_store import FlawedStore

INHERITABLE = "/dev/zero"
"""What this process would hand down to whatever it starts."""


STORES = {"flawed": FlawedStore, "redis": RedisStore}


def main() -> None:
    """Serves the test until the test closes its end of the pipe."""
    given = json.loads(sys.argv[1])
    ends_early = given.pop("ends_early")
    options = MonitorOptions(store_factory=STORES[given.pop("store")], **given)
    os.set_inheritable(os.open(INHERITABLE, os.O_RDONLY), True)
    stamps = ProgressStamps.create()
    stamps.suspend()  # no rank here makes progress; a test of silence ends the suspension
    names = {"os": os, "signal": signal, "threading": threading, "stamps": stamps, "Interruption": Interruption}
    names |= {"Lost": Lost, "forked": _forked, "descriptors": _descriptors, "before": _descriptors()}
    monitor = MonitorProcess(options, stamps)
    if ends_early:
        os._exit(1)
    monitor.wait_ready(60.0)
    _join(options)
    names |= {"monitor": monitor, "monitor_pid": monitor.pid}
    _say(monitor.pid)
    for line in sys.stdin:
        _say(eval(line, names))


def _join(options: MonitorOptions) -> None:
    connection = RedisStore(**options.store_kwargs).connect(options.group, options.call)
    process = MemberProcess(host=options.host, pid=os.getpid(), began=started_ticks(os.getpid()) or 0)
    connection.arrive(barriers.JOIN, options.member, pack(process))
    connection.close()


def _forked() -> int:
    """Forks a child that lives until the test kills it."""
    if (child := os.fork()) == 0:
        signal.pause()
    return child


def _descriptors() -> dict[str, str]:
    """The open descriptors; the one used for reading them is closed by then."""
    found = {}
    for place in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):
            found[place.name] = str(place.readlink())
    return found


def _say(what: Any) -> None:
    print(json.dumps(what, default=repr), flush=True)


if __name__ == "__main__":
    main()
