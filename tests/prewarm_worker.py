"""The worker that `tests/flow/test_prewarm.py` copies as `train.py` into the folder of a job: a gate worker that
imports a module.

argv: the gate's port, and a module, whose `IMPORTED_BY` (a process id) and `VERSION` it reports at the gate.
"""

import importlib
import os
import socket
import sys

port, name = sys.argv[1:]
module = importlib.import_module(name)
NAMES = "RANK WORLD_SIZE NVRX_CYCLE NVRX_GENERATION NVRX_REPLICA NVRX_NODE"
known = [f"{variable}={os.environ[variable]}" for variable in NAMES.split()]
known += [f"PID={os.getpid()}", f"IMPORTED_BY={module.IMPORTED_BY}", f"VERSION={module.VERSION}"]
known += [f"PREFIX={sys.prefix}", f"FOLDER={os.getcwd()}", f"LEADER={os.getpgid(0)}"]  # noqa: PTH109  no pathlib
gate = socket.create_connection(("127.0.0.1", int(port)))
gate.sendall("\0".join(known).encode() + b"\n")
print(f"rank {os.environ['RANK']} waits", flush=True)
said = gate.recv(1)
sys.exit(said[0] if said else 9)
