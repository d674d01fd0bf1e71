"""What this node can do for payloads, found by trying it; and what to do about the rest.

part           tried                                                       the defaults need it
─────────────  ──────────────────────────────────────────────────────────  ────────────────────
/dev/shm       how large it is, and how much of it is free                 yes
rings          whose lie in it; those of dead processes are removed        no
shm            a ring made; payloads written, and read in place            yes
tcp            a server and a client over the loopback                     yes
host name      whether the name that peers get is an address of this node      yes, between nodes
open files     whether a server's connections fit                          no
ucxx           the same server and client over it, in a process apart      no
RDMA           its devices, and whether UCX uses them                      no

`python -m nvrx_slurm.transport.doctor produce tcp` is the producer of a measurement, until its input ends. `… measure
ucxx` measures in a process apart, and prints what it saw: a library in native code may end its process, or never come
back.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import resource
import select
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as TooLate
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec

from nvrx_slurm.transport.client import PayloadClient
from nvrx_slurm.transport.errors import TransportError
from nvrx_slurm.transport.ref import PayloadRef
from nvrx_slurm.transport.ring import SharedRing
from nvrx_slurm.transport.ring_file import SHM, sweep
from nvrx_slurm.transport.server import PayloadServer
from nvrx_slurm.util.ownership import login_name
from nvrx_slurm.util.threads import in_thread

CONTAINER_BYTES = 64 << 20
SHARE_LEFT = 0.1
NAME_S = 5.0
OPEN_FILES = 2048
RDMA_DEVICES = Path("/sys/class/infiniband")
RDMA_TRANSPORTS = ("rc_", "ud_", "dc_", "srd/")
WITHIN_A_NODE = ("self/", "sysv/", "posix/", "cma/", "knem/", "xpmem/")
DECISION = "docs/decisions/0020-no-nixl.md"

INSTALL_UCXX = "only for RDMA: pip install 'nvrx-slurm[ucxx-cu12]' (with CUDA 13: ucxx-cu13)"
_WHEEL_HAS_NO_RDMA = (
    "the UCX of the wheels has no RDMA: install rdma-core and a UCX of 1.19 or newer with its development package, "
    "and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"
)
_LOCK_MORE = "ulimit -l unlimited (Slurm: PropagateResourceLimitsExcept=MEMLOCK, and LimitMEMLOCK=infinity of slurmd)"
_OR_ANOTHER = ', or name another: PayloadServer(ring, host="…")'
_LARGER_SHM = (
    "mount -o remount,size=… /dev/shm; docker run --shm-size=…; in Kubernetes a volume of memory on /dev/shm"
)


class Level(StrEnum):
    """How a part is. FAIL: what is used by default does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    ABSENT = "absent"


class TransportCheck(NamedTuple):
    """One part: what was seen, and what to do, "" where nothing is."""

    part: str
    level: Level
    seen: str
    todo: str = ""


def examine() -> list[TransportCheck]:
    """Check all parts, within a minute. Removes the rings of dead processes, as `SharedRing.create` does."""
    return [finding for check in CHECKS for finding in check()]


def is_fit(findings: list[TransportCheck]) -> bool:
    """Whether the default transports work."""
    return not any(finding.level is Level.FAIL for finding in findings)


def _shared_memory() -> Iterator[TransportCheck]:
    try:
        room = os.statvfs(SHM)
    except OSError as error:
        yield TransportCheck("/dev/shm", Level.FAIL, error.strerror or str(error), "mount a tmpfs there")
    else:
        yield room_for_rings(room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize)


def room_for_rings(size: int, free: int) -> TransportCheck:
    """The finding about /dev/shm, from its size and its free space in bytes."""
    seen = f"{gibibytes(size)}, {gibibytes(free)} free"
    if size <= CONTAINER_BYTES:
        return TransportCheck("/dev/shm", Level.WARN, f"{seen}: no more than containers have by default", _LARGER_SHM)
    if free < SHARE_LEFT * size:
        return TransportCheck("/dev/shm", Level.WARN, seen, "look at what lies there: du -sh /dev/shm/*")
    return TransportCheck("/dev/shm", Level.OK, seen)


def _rings() -> Iterator[TransportCheck]:
    # Removes those of dead processes, counts the others by user.
    swept = sweep()
    owners: Counter[int] = Counter()
    size = 0
    for path in SHM.glob("nvrx-ring-*"):
        # The ring may have been removed meanwhile.
        with contextlib.suppress(OSError):
            stat = path.stat()
            size += stat.st_size
            owners[stat.st_uid] += 1
    users = [f"{count} of {login_name(uid) or uid}" for uid, count in owners.most_common()]
    parts = [f"{gibibytes(size)}: {', '.join(users)}" if owners else "none"]
    if swept:
        parts.append(f"{len(swept)} of dead processes removed ({', '.join(swept)})")
    yield TransportCheck("rings", Level.OK, "; ".join(parts))


def _try(scheme: str, todo: str) -> Iterator[TransportCheck]:
    try:
        pace = measure(scheme)
    except TransportError as error:
        yield TransportCheck(scheme, Level.FAIL, error.said, todo)
    else:
        yield TransportCheck(scheme, Level.OK, in_words(pace))


def _host_name() -> Iterator[TransportCheck]:
    # A server passes this name to its peers, and each of them looks it up for itself. In a thread: a resolver has no
    # timeout of its own.
    name = socket.gethostname()
    looking = in_thread(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), "look up the host name")
    try:
        found = [str(address[0]) for *_, address in looking.result(NAME_S)]
    except (TooLate, OSError) as error:
        why = f"was not looked up in {NAME_S:.0f} s" if isinstance(error, TooLate) else "has no address here"
        todo = f"see that other nodes can look it up{_OR_ANOTHER}"
        yield TransportCheck("host name", Level.WARN, f"{name} {why}", todo)
    else:
        yield known_as(name, list(dict.fromkeys(found)))


def known_as(name: str, addresses: list[str]) -> TransportCheck:
    """The finding about a host name, from its addresses as this node sees them."""
    seen = f"{name} is {', '.join(addresses)}"
    for address in addresses:
        # Only an address of this node can be bound to.
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                todo = f"correct its entry{_OR_ANOTHER}"
                return TransportCheck("host name", Level.WARN, f"{seen}: no address of this node", todo)
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        todo = f"fine if other nodes see another address (getent hosts {name}){_OR_ANOTHER}"
        return TransportCheck("host name", Level.WARN, f"{seen}: the loopback", todo)
    return TransportCheck("host name", Level.OK, seen)


def _open_files() -> Iterator[TransportCheck]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = soft == resource.RLIM_INFINITY or soft >= OPEN_FILES
    todo = f"each connection is one, and a server takes 1024: ulimit -n, up to {limit(hard)} here"
    yield TransportCheck(
        "open files", Level.OK if is_enough else Level.WARN, f"at most {limit(soft)}", "" if is_enough else todo
    )


def _ucxx() -> Iterator[TransportCheck]:
    # And RDMA, which is what it is for.
    resources: tuple[str, ...] = ()
    if find_spec("ucxx") is None:
        yield TransportCheck("ucxx", Level.ABSENT, "not installed", INSTALL_UCXX)
    else:
        try:
            pace = measure_apart("ucxx")
        except TransportError as error:
            todo = "python -m nvrx_slurm.transport.doctor measure ucxx says more"
            yield TransportCheck("ucxx", Level.WARN, error.said, todo)
        else:
            resources = pace.resources
            used = (each for each in resources if not each.startswith(WITHIN_A_NODE))
            seen = f"{in_words(pace)}; {', '.join((*pace.versions, *used))}"
            yield TransportCheck("ucxx", Level.OK, seen)
    # `mlx5_0`, … of this node, as the kernel names them.
    yield rdma(
        sorted(path.name for path in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else [],
        resources,
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    )


def rdma(devices: list[str], resources: tuple[str, ...], memlock: int) -> TransportCheck:
    """The finding about RDMA: its devices, what UCX uses, and how many bytes it may lock (it pins what it sends)."""
    used = [each for each in resources if each.startswith(RDMA_TRANSPORTS)]
    if not devices:
        return TransportCheck("RDMA", Level.ABSENT, f"no device in {RDMA_DEVICES}")
    seen = f"{', '.join(devices)}"
    if not used:
        todo = _WHEEL_HAS_NO_RDMA if resources else INSTALL_UCXX
        return TransportCheck("RDMA", Level.WARN, f"{seen}: not used by UCX", todo)
    if memlock != resource.RLIM_INFINITY:
        return TransportCheck("RDMA", Level.WARN, f"{seen}, but at most {memlock} bytes may be locked", _LOCK_MORE)
    return TransportCheck("RDMA", Level.OK, f"{seen}: {', '.join(used)}")


# Each yields the checks of one or two parts, in the order in which users see them.
CHECKS: tuple[Callable[[], Iterator[TransportCheck]], ...] = (
    _shared_memory,
    _rings,
    partial(_try, "shm", "without a ring nothing works: see /dev/shm above"),
    partial(
        _try, "tcp", "is the loopback up (ip addr show lo), is there a firewall? The ring itself can be read without"
    ),
    _host_name,
    _open_files,
    _ucxx,
    lambda: iter([TransportCheck("nixl", Level.ABSENT, "not offered", DECISION)]),
)


def in_words(pace: Pace) -> str:
    return f"{pace.round_trip_s * 1e6:.0f} µs for 1 KiB, {pace.bytes_per_s / 1e9:.2f} GB/s"


def gibibytes(number: int) -> str:
    if number >= 2**30:
        return f"{number / 2**30:.1f} GiB"
    return f"{number / 2**20:.0f} MiB" if number >= 2**20 or not number else f"{number / 2**10:.0f} KiB"


def limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


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
    """What the producer has written: one payload of each size."""

    token: bytes
    refs: tuple[PayloadRef, ...]


def measure(scheme: str) -> Pace:
    """Read payloads of a producer in another process. Raises TransportError: that /dev/shm has no room for 16 MiB, or
    what went wrong on the way."""
    pipe = subprocess.PIPE
    try:
        started = subprocess.Popen(_command("produce", scheme), stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise TransportError(f"no process could be started to try {scheme}: {error}") from None
    into = bytearray(max(SIZES))
    medians_s = []
    # The producer ends with its input, so also when this process is killed.
    with started as process:
        assert process.stdin and process.stdout and process.stderr
        try:
            if not select.select([process.stdout], [], [], START_S)[0]:
                raise TransportError(f"a producer has not begun in {START_S:.0f} s")
            line = process.stdout.readline()
            if not line:
                raise TransportError(_last_words(process.stderr.read(), process.wait()))
            produced = msgspec.json.decode(line, type=_Produced)
            with PayloadClient(transports=(scheme,), token=produced.token) as client:
                for ref, reads in zip(produced.refs, READS, strict=True):
                    took_s = []
                    for _ in range(reads):
                        began = time.monotonic()
                        client.read(ref, deadline=READ_S, into=into, keep=True)
                        took_s.append(time.monotonic() - began)
                    medians_s.append(statistics.median(took_s))
            process.stdin.close()
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise TransportError(f"a producer of {scheme} has not ended in {END_S:.0f} s") from None
        finally:
            # The end of the `with` block waits for the process without a bound.
            process.kill()
    return Pace(medians_s[0], SIZES[1] / medians_s[1])


def measure_apart(scheme: str) -> Pace:
    """The same in a process of its own, bounded, with UCX's own versions and resources. Raises TransportError."""
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


def _command(act: str, scheme: str) -> list[str]:
    return [sys.executable, "-m", __name__ if __name__ != "__main__" else "nvrx_slurm.transport.doctor", act, scheme]


def _last_words(stderr: bytes, code: int) -> str:
    said = stderr.decode(errors="replace").strip().splitlines()
    return said[-1] if said and code > 0 else f"a process that tried it has ended with {code}"


def _produce(scheme: str) -> None:
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
        ucxx, library = importlib.import_module("ucxx"), importlib.import_module("ucxx._lib.libucxx")
        versions = (f"ucxx {ucxx.__version__}", f"UCX {'.'.join(map(str, ucxx.get_ucx_version()))}")
        resources = tuple(dict.fromkeys(_RESOURCE.findall(library.UCXContext({}).info)))
        pace = msgspec.structs.replace(pace, versions=versions, resources=resources)
    print(msgspec.json.encode(pace).decode())


_ACTS: dict[str, Callable[[str], None]] = {"produce": _produce, "measure": _measure}

if __name__ == "__main__":
    try:
        _ACTS[sys.argv[1]](sys.argv[2])
    except TransportError as error:
        sys.exit(str(error))
