"""A FUSE file system that does not answer. Run as a program, this module is its server, which answers only the first
questions about the root.

The server is a process of its own: a thread would be stopped together with the process that waits for its answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

IS_HERE = os.access("/dev/fuse", os.R_OK | os.W_OK)
MNT_DETACH = 2

# <linux/fuse.h>: request codes, the headers of a request and of an answer, and the answers' bodies.
GETATTR, INIT, ACCESS = 3, 26, 34
REQUEST, ANSWER = struct.Struct("=IIQQIIII"), struct.Struct("=IiQ")
INIT_ANSWER, ATTRIBUTES = struct.Struct("=IIIIHHIIHHI28x"), struct.Struct("=QII6Q10I")
ENOSYS = 38


@contextlib.contextmanager
def frozen(folder: Path, *, answers: bool = False) -> Iterator[None]:
    """Mount a file system that does not answer on the folder. With `answers` a process can change to the folder and
    stat it, before the file system freezes."""
    libc, device = ctypes.CDLL(None, use_errno=True), os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"frozen", os.fsencode(folder), b"fuse", 0, options):
        os.close(device)
        pytest.skip(f"cannot mount a FUSE file system: {os.strerror(ctypes.get_errno())}")
    server = None
    if answers:
        server = subprocess.Popen([sys.executable, __file__, str(device)], pass_fds=[device])
    try:
        yield
    finally:
        if server is not None:
            server.kill()
            server.wait()
        os.close(device)  # a process that still waits gets ENOTCONN
        libc.umount2(os.fsencode(folder), MNT_DETACH)


def serve(device: int) -> None:
    """Answer until both GETATTR and ACCESS were asked. Later requests are not read, so that a process that waits for
    one can be killed."""
    asked = set()
    while not asked >= {ACCESS, GETATTR}:
        _, kind, unique, *_ = REQUEST.unpack_from(os.read(device, 1 << 17))
        asked.add(kind)
        answer, error = b"", ENOSYS
        if kind == INIT:
            answer, error = INIT_ANSWER.pack(7, 31, 0, 0, 1, 1, 4096, 1, 0, 0, 0), 0
        elif kind == GETATTR:
            answer, error = ATTRIBUTES.pack(3600, 0, 0, 1, *[0] * 8, stat.S_IFDIR | 0o755, 2, 0, 0, 0, 4096, 0), 0
        os.write(device, ANSWER.pack(ANSWER.size + len(answer), -error, unique) + answer)
    signal.pause()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
