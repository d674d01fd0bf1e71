"""A worker that connects to the test's gate, waits, and exits as the test orders. Standard library only."""

import os
import socket
import sys

NAMES = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE "
NAMES += "MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS "
NAMES += "NVRX_CYCLE NVRX_GENERATION NVRX_REPLICA NVRX_NODE"

gate = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
known = [f"{name}={os.environ[name]}" for name in NAMES.split()]
gate.sendall("\0".join([f"PID={os.getpid()}", *known]).encode() + b"\n")
print(f"rank {os.environ['RANK']} waits", flush=True)
said = gate.recv(1)
sys.exit(said[0] if said else 9)
