"""Decodes thousands of broken schemas under an audit hook; prints how many were refused. Exits with 1 at the first
event that hostile input must not cause."""

from __future__ import annotations

import os
import random
import sys

import numpy as np

from nvrx_slurm.transport.codec import decode, encode
from nvrx_slurm.transport.errors import TransportError

TIMES = 5000
FORBIDDEN = ("import", "exec", "compile", "open", "pickle.", "os.", "subprocess.", "socket.", "ctypes.dlopen")
WORDS = (
    "pickle",
    "array",
    "scalar",
    "list",
    "text",
    "O",
    "|O8",
    "os.system",
    "<f4",
    "numpy.foo",
    "999999999999",
    "-1",
    "[",
)

armed = False


def watch(event: str, arguments: tuple[object, ...]) -> None:
    if armed and event.startswith(FORBIDDEN):
        print(event, arguments, file=sys.stderr, flush=True)
        os._exit(1)


def broken(schema: str, dice: random.Random) -> str:
    for _ in range(dice.randint(1, 3)):
        start = dice.randrange(len(schema))
        put = dice.choice((*WORDS, "", schema[dice.randrange(len(schema)) :][:10]))
        schema = schema[:start] + put + schema[start + dice.randint(0, 8) :] or "["
    return schema


def main() -> None:
    global armed
    record = np.zeros((2, 3), [("a", "f4"), ("b", "M8[ns]"), ("c", [("d", "S3", (2,))])])
    obj = {"a": [np.zeros((3, 4), "f4").T, b"1", "x" * 300], "b": (np.float32(1), np.str_("text")), "c": record}
    encoded = encode(obj)
    payload = memoryview(b"".join(encoded.buffers))
    decode(encoded.schema, payload)  # all that it imports is loaded now
    sys.addaudithook(watch)
    dice, refused = random.Random(7), 0
    for _ in range(TIMES):
        schema = broken(encoded.schema, dice)
        armed = True
        try:
            decode(schema, payload)
        except TransportError:
            refused += 1
        finally:
            armed = False
    print(refused)


if __name__ == "__main__":
    main()
