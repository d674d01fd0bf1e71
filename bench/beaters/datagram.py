"""Usage: datagram.py RUNS: a Unix datagram per beat, to a process that reads them."""

import os
import socket
import sys
from time import perf_counter

BEATS = 20_000

reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
if os.fork() == 0:
    writer.close()
    while reader.recv(64) != b"end":
        pass
    os._exit(0)
for _ in range(int(sys.argv[1]) + 1):
    began = perf_counter()
    for step in range(BEATS):
        writer.send(b"0 %d" % step)
    print("beat", (perf_counter() - began) / BEATS * 1e6, flush=True)
writer.send(b"end")
os.wait()
