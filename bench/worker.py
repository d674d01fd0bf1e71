"""A worker that reports its start, then stands until one of its peers vanishes. Standard library only, `python -S`.

Usage: worker.py HOST PORT, where a `bench.worker_registry.WorkerRegistry` listens.
"""

import time

started = time.monotonic()

import os  # noqa: E402  the stamp comes first
import socket  # noqa: E402
import sys  # noqa: E402

registry = socket.create_connection((sys.argv[1], int(sys.argv[2])))
world = os.environ["MASTER_PORT"]
registry.sendall(f"{world} {os.environ['RANK']} {os.getpid()} {started!r}\n".encode())
registry.recv(1)
os._exit(1)  # a peer vanished: what a failed collective does to a training process
