"""Reads the heartbeats of a job and counts them, four times a second: no decoding, no liveness, no journal, no bound.

Usage: bare_listener.py HOST PORT KEY    (the password on the standard input)
"""

import socket
import sys
import time
from typing import Any

import hiredis

PACE_S = 0.25
BATCH = 4096

host, port, key = sys.argv[1], int(sys.argv[2]), sys.argv[3]
connection = socket.create_connection((host, port))
reader = hiredis.Reader()


def ask(*words: str) -> Any:
    parts = "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
    connection.sendall(f"*{len(words)}\r\n{parts}".encode())
    while (reply := reader.gets()) is False:
        reader.feed(connection.recv(65536))
    return reply


ask("AUTH", sys.stdin.read())
last, heard = "$", 0
last = ask("XREVRANGE", key, "+", "-", "COUNT", "1")[0][0].decode()
while True:
    reply = ask("XREAD", "COUNT", str(BATCH), "STREAMS", key, last)
    items = reply[0][1] if reply else []
    heard += len(items)
    if items:
        last = items[-1][0].decode()
    if len(items) < BATCH:
        time.sleep(PACE_S)
