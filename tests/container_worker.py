"""A worker inside a container: it sends a heartbeat, connects to the test's gate, and exits as the test orders.

Only its agent gives it this package, and only the modules that a worker imports.
"""

import os
import signal
import socket
import sys
from pathlib import Path

from nvrx_slurm.workload import beat

RAISES = 200
"""The code that the test sends to make the worker raise an exception."""


def asked_to_end(*_: object) -> None:
    print("asked to end", flush=True)
    os._exit(0)


def wait_at_the_gate() -> int:
    """The exit code that the test sends, or 9 if the test closes the connection."""
    gate = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    known = [f"{name}={value}" for name, value in os.environ.items() if "\n" not in value + name]
    known += [f"CWD={Path.cwd()}", f"UID={os.getuid()}", f"PYTHON={sys.executable}"]
    gate.sendall("\0".join([*known, f"PID={os.getpid()}"]).encode() + b"\n")
    said = gate.recv(1)
    return said[0] if said else 9


signal.signal(signal.SIGTERM, asked_to_end)
beat(step=41)
said = wait_at_the_gate()
if said == RAISES:
    raise ValueError("as the test has said")
sys.exit(said)
