"""A worker inside of a container: it beats, tells the test that it is there, and ends as the test says.

It has this package from its agent alone, and of that what a worker imports.
"""

import os
import signal
import socket
import sys
from pathlib import Path

from nvrx_slurm.workload import beat

RAISES = 200
"""What the test says to have it raise an exception."""


def asked_to_end(*_: object) -> None:
    print("asked to end", flush=True)
    os._exit(0)


def wait_at_the_gate() -> int:
    """What the test has said, or 9 once it has gone."""
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
