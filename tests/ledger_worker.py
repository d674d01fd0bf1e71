"""A worker that records each of its steps in a ledger that all workers of a job share. Standard library only.

A line is `<cycle> <rank> <node> <pid> <when it started, monotonic ns> <step>`. As long as the process lives, even
frozen, it holds the lock of its rank. If another process holds that lock, the worker's first line has `held` in place
of a step. The worker exits as the test's gate orders.
"""

import fcntl
import os
import select
import socket
import sys
import time

PERIOD_S = 0.005


def main() -> int:
    gate_port, ledger = int(sys.argv[1]), sys.argv[2]
    env = os.environ
    who = f"{env['NVRX_CYCLE']} {env['RANK']} {env['NVRX_NODE']} {os.getpid()} {time.monotonic_ns()}"
    book = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    lock = os.open(f"{ledger}.rank-{env['RANK']}", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.write(book, f"{who} held\n".encode())
    gate = socket.create_connection(("127.0.0.1", gate_port))
    known = [f"{name}={value}" for name, value in env.items() if name == "RANK" or name.startswith("NVRX_")]
    gate.sendall("\0".join([f"PID={os.getpid()}", *known]).encode() + b"\n")
    step = 0
    while not select.select([gate], [], [], PERIOD_S)[0]:
        os.write(book, f"{who} {step}\n".encode())
        step += 1
    said = gate.recv(1)
    return said[0] if said else 9


if __name__ == "__main__":
    sys.exit(main())
