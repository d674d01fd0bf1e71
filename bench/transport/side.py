"""One process of a pair: `python -m bench.transport.side CARRIER producer|reader`. Lines of JSON, each answered.

    in    {"size", "count", "options", "where"}                      first; "where": for a reader, its producer's
    out   where                                                      for a producer; null for a reader
    in    null (a producer)       out   {"took": […], "refs": […]}   as many payloads as it has room for were written
    in    refs (a reader)         out   {"took": […]}                they were read, one after the other

A payload has its number at both ends. The reader compares them after the clock has stopped: a reader that got other
bytes gives no result.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import struct
import sys
from collections.abc import Iterator
from time import perf_counter
from typing import Any

NUMBER = struct.Struct("<Q")


ROLES = ("producer", "reader")


def main() -> None:
    carrier = importlib.import_module(f"bench.transport.carriers.{sys.argv[1]}")
    orders = map(json.loads, sys.stdin)
    given = next(orders)
    # Each role on its half of the processors, as on two nodes: else the scheduler has some pairs share one, where a
    # round trip takes a fifth of the time, and others not.
    place, processors = ROLES.index(sys.argv[2]), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, processors[place::2] or processors)
    (_produce, _read)[place](carrier, given, orders)


def _produce(carrier: Any, given: dict[str, Any], orders: Iterator[Any]) -> None:
    producer = carrier.Producer(given["size"], given["count"], given["options"])
    payload = memoryview(bytearray(os.urandom(given["size"])))
    numbers = itertools.count(1)
    _say(producer.where)
    for _ in orders:
        took, refs = [], []
        for slot in range(given["count"]):
            number = next(numbers)
            NUMBER.pack_into(payload, 0, number)
            NUMBER.pack_into(payload, len(payload) - NUMBER.size, number)
            began = perf_counter()
            written = producer.write(slot, payload)
            took.append(perf_counter() - began)
            refs.append([number, producer.refer(slot, written)])
        _say({"took": took, "refs": refs})
    if hasattr(producer, "close"):
        producer.close()


def _read(carrier: Any, given: dict[str, Any], orders: Iterator[Any]) -> None:
    reader = carrier.Reader(given["size"], given["where"], given["options"])
    _say(None)
    for refs in orders:
        numbers = [number for number, _ in refs]

        def check(payload: Any, place: int, numbers: list[int] = numbers) -> None:
            data = memoryview(payload).cast("B")
            ends = {NUMBER.unpack(data[: NUMBER.size])[0], NUMBER.unpack(data[-NUMBER.size :])[0]}
            if len(data) != given["size"] or ends != {numbers[place]}:
                raise RuntimeError(f"read {len(data)} bytes of payload {ends}, and not {numbers[place]}")

        _say({"took": reader.timed([ref for _, ref in refs], check)})


def _say(answer: Any) -> None:
    os.write(_answers, f"{json.dumps(answer)}\n".encode())


if __name__ == "__main__":
    _answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    main()
    os._exit(0)  # not all libraries let go of a process
