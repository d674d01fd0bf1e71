"""Starts N processes on this machine as ranks of one world, and lets the others live when one of them dies.

    python launch.py 4 ddp.py --checkpoint-dir /tmp/inprocess

The ranks have the MASTER_PORT that is set here, or else a free one.

Every launcher that leaves the others alone will do: `srun --kill-on-bad-exit=0`, `mpirun` with fault tolerance.
torchrun stops all workers when one of them dies, so there a death is for torchrun to mend.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys


def hold_port() -> socket.socket:
    """Bound to a free port, which no other process is given meanwhile. A rank can listen on it: nothing does here."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def start(world: int, command: list[str], free_port: int) -> list[subprocess.Popen[bytes]]:
    port = os.environ.get("MASTER_PORT") or str(free_port)
    world_of = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return [subprocess.Popen([sys.executable, *command], env={**os.environ, **world_of, **each}) for each in own]


def ending(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with {code}"


def main() -> None:
    """Exits with 0 if anybody did, for then all who were left have completed."""
    with hold_port() as held:
        workers = start(int(sys.argv[1]), sys.argv[2:], held.getsockname()[1])
        try:
            codes = [worker.wait() for worker in workers]
        except KeyboardInterrupt:  # which the workers got too, from the terminal
            codes = [worker.wait() for worker in workers]
    for rank, code in enumerate(codes):
        if code:
            print(f"the process that began as rank {rank} {ending(code)}", flush=True)
    sys.exit(0 if 0 in codes else 1)


if __name__ == "__main__":
    main()
