"""The floor of a warm start: a process with torch imported that forks. No supervisor, no environment, no `__main__`.

Usage: bare_fork_server.py MODULE… For each byte of its standard input, a digit, it forks so many workers, and each of
them writes the time of its first line. Standard library only.
"""

import importlib
import os
import sys
import time

for module in sys.argv[1:]:
    importlib.import_module(module)
os.write(1, b"ready\n")
while count := os.read(0, 1):
    for _ in range(int(count)):
        if os.fork() == 0:
            os.write(1, f"{time.monotonic()!r}\n".encode())
            os._exit(0)
    for _ in range(int(count)):
        os.wait()
