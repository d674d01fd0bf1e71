"""`python -m bench.one_node COMMAND…`: a node without a job: an agent's supervisor, which starts workers when told.

It reads lines of JSON from its standard input, and answers each with one on its standard output:

    {"warm": [ahead, module, …]}    start a warm process → {"process": its id}, once it is ready
    {"spawn": count}                start ranks 0 to count - 1 → {"ordered": {rank: monotonic seconds}}, once they run
    {"stop": true}                  kill them → {}, once they have ended

and at the end of its input with {"cpu_s": …}, of itself and all that it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from bench.errors import PeerFailed
from bench.processes import temporary_folder
from bench.usage import spent_s
from nvrx_slurm.agent.starting import RANK_VARIABLES
from nvrx_slurm.agent.supervisor import descendants
from nvrx_slurm.agent.workers import Exited, Spawned, Stopped, WarmSaid, WorkerEvent, Workers
from nvrx_slurm.diagnostics.stacks.hook_client import hook_environment
from nvrx_slurm.jobspec.env import child_environment
from nvrx_slurm.store.embedded import free_port
from nvrx_slurm.util.clock import SystemClock

ROLE = "main"


class Node:
    """Serves one line after the other."""

    def __init__(self, command: list[str], room: Path) -> None:
        self._command, self._room = command, room
        self._clock, self._inbox = SystemClock(), asyncio.Queue[WorkerEvent]()
        self._workers = Workers(self._inbox.put_nowait)
        self._warm: str | None = None
        self._env = {"OMP_NUM_THREADS": "1", **hook_environment(child_environment({}), room)}

    async def serve(self) -> None:
        self._workers.start()
        try:
            while line := await asyncio.to_thread(sys.stdin.readline):
                ((what, given),) = json.loads(line).items()
                if what == "warm":
                    answer = await self._warm_up(given)
                elif what == "spawn":
                    answer = await self._spawn(given)
                else:
                    answer = await self._stop()
                print(json.dumps(answer), flush=True)
        finally:
            self._workers.close()

    async def _warm_up(self, given: list[Any]) -> dict[str, Any]:
        ahead, *modules = given
        wanted = [" ".join(RANK_VARIABLES), "0", "", *modules]
        self._workers.warm(ROLE, self._command, self._env, str(self._room), wanted, ahead)
        event = await self._inbox.get()
        if not isinstance(event, WarmSaid) or event.words[0] != "ready":
            raise PeerFailed(f"no warm process: {event}")
        self._warm = ROLE
        (process,) = descendants(self._workers.supervisor_pid)
        return {"process": process}

    async def _spawn(self, count: int) -> dict[str, Any]:
        """As `agent/starting.py`: one order after the other."""
        world = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
        world["MASTER_PORT"] = str(free_port("127.0.0.1"))
        ordered = dict[int, float]()
        log = os.open(self._room / "workers.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for rank in range(count):
            env = {**self._env, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ordered[rank] = self._clock.monotonic()
            self._workers.spawn(rank, self._command, env, str(self._room), os.dup(log), os.dup(log), self._warm)
        os.close(log)
        for _ in range(count):
            event = await self._inbox.get()
            if not isinstance(event, Spawned) or event.warm != (self._warm is not None):
                raise PeerFailed(f"no {'warm' if self._warm else 'cold'} worker: {event}")
        return {"ordered": ordered}

    async def _stop(self) -> dict[str, Any]:
        self._workers.stop(0.0)
        while not isinstance(event := await self._inbox.get(), Stopped):
            if isinstance(event, Exited) and event.code:
                log = (self._room / "workers.log").read_text(errors="replace")
                raise PeerFailed(f"rank {event.rank} exited with {event.code}: {log[-2000:]}")
        return {}


def main() -> None:
    with temporary_folder() as room:
        asyncio.run(Node(sys.argv[1:], room).serve())
    cpu_s = sum(map(spent_s, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
    with contextlib.suppress(BrokenPipeError):  # an input that just ended has no reader
        print(json.dumps({"cpu_s": cpu_s}), flush=True)


if __name__ == "__main__":
    main()
