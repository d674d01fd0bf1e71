"""A worker that imports torch and reports: its first line, and the one after the import. Then it waits.

Usage: torch_import.py HOST PORT, where a `bench.worker_registry.WorkerRegistry` listens.
"""

import time

STAMPS = {"first line": time.monotonic()}

import torch  # noqa: E402, F401  the stamp comes first

STAMPS["imports"] = time.monotonic()

import json  # noqa: E402
import os  # noqa: E402
import socket  # noqa: E402
import sys  # noqa: E402

registry = socket.create_connection((sys.argv[1], int(sys.argv[2])))
report = (
    f"{os.environ['MASTER_PORT']} {os.environ['RANK']} {os.getpid()} {STAMPS['imports']!r} {json.dumps(STAMPS)}\n"
)
registry.sendall(report.encode())
registry.recv(1)
