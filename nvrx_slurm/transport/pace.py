"""How fast a transport moves payloads on this node, by moving some: from a producer in another process to here.

`python -m nvrx_slurm.transport.pace produce tcp` is that producer, until its input ends. `… measure ucxx` measures in
a process apart, and prints what it saw: a library in native code may end its process, or never come back.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec

from nvrx_slurm.transport.client import PayloadClient
from nvrx_slurm.transport.errors import TransportError
from nvrx_slurm.transport.ref import PayloadRef

SIZES = (1 << 10, 8 << 20)
READS = (100, 8)
START_S, READ_S, END_S = 15.0, 5.0, 5.0
APART_S = 60.0
_LOOPBACK = "127.0.0.1"
_RESOURCE = re.compile(r"^#\s+resource\s.*\s(\S+/\S+)$", re.MULTILINE)


class Pace(msgspec.Struct, frozen=True):
    """`round_trip_s`: the median of reads of 1 KiB, `bytes_per_s`: of 8 MiB. `versions` and `resources`: of UCX, what
    it is, and what it has found here (`tcp/eth0`, `rc_mlx5/mlx5_0:1`)."""

    round_trip_s: float
    bytes_per_s: float
    versions: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()


class _Produced(msgspec.Struct, frozen=True):
    """One payload of each size."""

    token: bytes
    refs: tuple[PayloadRef, ...]


def measure(scheme: str) -> Pace:
    """Raises TransportError: that /dev/shm has no room for 16 MiB, or what went wrong on the way."""
    into = bytearray(max(SIZES))
    with _producer(scheme) as produced, PayloadClient(transports=(scheme,), token=produced.token) as client:
        medians_s = []
        for ref, reads in zip(produced.refs, READS, strict=True):
            took_s = []
            for _ in range(reads):
                began = time.monotonic()
                client.read(ref, deadline=READ_S, into=into, keep=True)
                took_s.append(time.monotonic() - began)
            medians_s.append(statistics.median(took_s))
    return Pace(medians_s[0], SIZES[1] / medians_s[1])


def measure_apart(scheme: str) -> Pace:
    """The same in a process of its own, bounded, with what UCX tells of itself. Raises TransportError."""
    try:
        done = subprocess.run(
            _command("measure", scheme), capture_output=True, stdin=subprocess.DEVNULL, timeout=APART_S
        )
    except subprocess.TimeoutExpired:
        raise TransportError(f"trying {scheme} has not come to an end in {APART_S:.0f} s") from None
    except OSError as error:
        raise TransportError(f"no process could be started to try {scheme}: {error}") from None
    if done.returncode != 0:
        raise TransportError(_last_words(done.stderr, done.returncode))
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Pace)


@contextlib.contextmanager
def _producer(scheme: str) -> Iterator[_Produced]:
    """It ends with its input, so also when this process is killed."""
    pipe = subprocess.PIPE
    try:
        started = subprocess.Popen(_command("produce", scheme), stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise TransportError(f"no process could be started to try {scheme}: {error}") from None
    with started as process:
        assert process.stdin and process.stdout and process.stderr
        try:
            if not select.select([process.stdout], [], [], START_S)[0]:
                raise TransportError(f"a producer has not begun in {START_S:.0f} s")
            line = process.stdout.readline()
            if not line:
                raise TransportError(_last_words(process.stderr.read(), process.wait()))
            yield msgspec.json.decode(line, type=_Produced)
            process.stdin.close()
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise TransportError(f"a producer of {scheme} has not ended in {END_S:.0f} s") from None
        finally:
            process.kill()


def _command(act: str, scheme: str) -> list[str]:
    return [sys.executable, "-m", __name__ if __name__ != "__main__" else "nvrx_slurm.transport.pace", act, scheme]


def _last_words(stderr: bytes, code: int) -> str:
    said = stderr.decode(errors="replace").strip().splitlines()
    return said[-1] if said and code > 0 else f"a process that tried it has ended with {code}"


def _produce(scheme: str) -> None:
    from nvrx_slurm.transport.ring import SharedRing
    from nvrx_slurm.transport.server import PayloadServer

    transport = "tcp" if scheme == "shm" else scheme
    with (
        SharedRing.create(slots=len(SIZES), slot_bytes=max(SIZES)) as ring,
        PayloadServer(ring, transport=transport, ports=1, host=_LOOPBACK) as server,
    ):
        produced = _Produced(server.token, tuple(server.write(bytes(size)) for size in SIZES))
        print(msgspec.json.encode(produced).decode(), flush=True)
        sys.stdin.read()


def _measure(scheme: str) -> None:
    pace = measure(scheme)
    if scheme == "ucxx":
        pace = msgspec.structs.replace(pace, versions=_ucx_versions(), resources=_ucx_resources())
    print(msgspec.json.encode(pace).decode())


def _ucx_versions() -> tuple[str, ...]:
    ucxx = importlib.import_module("ucxx")
    return (f"ucxx {ucxx.__version__}", f"UCX {'.'.join(map(str, ucxx.get_ucx_version()))}")


def _ucx_resources() -> tuple[str, ...]:
    library = importlib.import_module("ucxx._lib.libucxx")
    return tuple(dict.fromkeys(_RESOURCE.findall(library.UCXContext({}).info)))


_ACTS: dict[str, Callable[[str], None]] = {"produce": _produce, "measure": _measure}

if __name__ == "__main__":
    try:
        _ACTS[sys.argv[1]](sys.argv[2])
    except TransportError as error:
        sys.exit(str(error))
