"""`python -m ci.fuzz [--inputs N] [--seed S] [--atheris] [NAME …]`: all decoders of outside bytes, fed with nonsense.

Each target is a decoder and samples of what it takes. Inputs are samples that were changed in a few places, and some
bytes from nowhere. Only the target's own errors may come out, and no input may take long. With `--atheris` (the extra
`fuzz`, Linux) libFuzzer looks for inputs by coverage; else they come from a seed, and the same seed gives the same.
"""

from __future__ import annotations

import argparse
import importlib
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from nvrx_slurm.attribution.analyze.flight_recorder import read_dump
from nvrx_slurm.attribution.analyze.unpickling import load_plain
from nvrx_slurm.attribution.ledger import decode_blames
from nvrx_slurm.errors import UntrustedRecord
from nvrx_slurm.inprocess import barriers, ledger, monitor
from nvrx_slurm.inprocess.attribution import Interruption
from nvrx_slurm.jobspec.plan import plan_from_json
from nvrx_slurm.journal import records, restarts
from nvrx_slurm.journal.folder import JobInfo, Result, StoreAddress
from nvrx_slurm.liveness import connection as liveness
from nvrx_slurm.store.job_store import JobStore
from nvrx_slurm.store.sealing import open_heartbeat, open_order, seal_heartbeat
from nvrx_slurm.transport import directory
from nvrx_slurm.transport.errors import TransportError
from nvrx_slurm.transport.ref import PayloadRef
from nvrx_slurm.util.decoding import decode, decode_json
from nvrx_slurm.util.job_key import JobKey

INPUTS = 1_000_000
SLOW_S = 2.0
"""No input of a few kilobytes may take longer."""

LONGEST = 1 << 12
SIGNS = b'\x00\xff\x80\xc1\xdf\xdd\xcf\x81\xa5{}[]",:\\/.-0123456789eE\x1b\n'
Decoder = Callable[[bytes], object]


class Target(NamedTuple):
    """`errors`: what it may raise."""

    decode: Decoder
    samples: tuple[bytes, ...]
    errors: tuple[type[Exception], ...] = (UntrustedRecord,)


KEY = JobKey("the key of a job that is fuzzed")
PLACE = "nvrx:{7}:place"
OPENED = records.RendezvousOpened(replica="main-0", cycle=3, dump="a rank hangs")
JOINED = records.NodeJoined(node="n1", incarnation="3f2a", seq=1, addr="10.0.0.1", port=29500, pid=7)
ENTRY = records.Entry(n=3, t=1.5, record=OPENED)
BEAT = records.Heartbeat(node="n1", incarnation="3f2a", steps={0: 7}, quiet={0: 0.5}, sections={0: (("step", 0.1),)})
ASSIGNED = records.Assignment(
    group_rank=0, first_rank=0, workers=8, world_size=16, group_world_size=2, master_addr="n1", master_port=29500,
    role="main", seen={"step": (5, 1.5)},
)  # fmt: skip
RESTART = restarts.InProcessRestart(
    cause="rank 3 failed", iteration=1, world_size=8, active_world_size=7, total_s=1.5, phases={"aborted": 0.1}
)
REF = PayloadRef(
    node="n1",
    ring="nvrx-ring-7-9-ab",
    slot=1,
    generation=2,
    size=3,
    checksum="",
    schema="[1,null]",
    ports=("tcp://n1:1",),
)
DUMP = {
    "version": "2.4",
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "entries": [
        {"process_group": ("0", "default_pg"), "collective_seq_id": 4, "profiling_name": "nccl:all_reduce",
         "state": "scheduled", "input_sizes": [[4, 5]], "frames": [{"name": "f", "filename": "t.py", "line": 3}]},
    ],
}  # fmt: skip
JSON = msgspec.json.encode
LOST = ledger.Lost(iteration=0, member=1, interruption=Interruption.TERMINATED)
JOB = {"job_id": "7", "name": "x", "cluster": "slurm", "started_at": 1.0, "nodes": ["n1", "n2"]}
PLAN = b'{"name":"x","roles":[{"name":"main","command":["a"]}],"workdir":"/w","folder":"/f"}'
STARTING = JSON(
    barriers.NewPlace(
        rank=0,
        world_size=2,
        active_rank=None,
        active_world_size=2,
        process=barriers.MemberProcess(host="h", pid=1, began=2),
    )
)
STORE = {"url": "redis://h:1", "password": "p", "job": "7", "token": "t"}


def _signed(data: bytes) -> object:
    """As the store's readers do."""
    return records.unpack_record(KEY.verify(PLACE, data))


def _numbered(data: bytes) -> object:
    """As an agent reads an order, where its signature holds."""
    _, packed = open_order(KEY, PLACE, KEY.sign(PLACE, data), 0)
    return records.unpack_order(packed)


def _sender(data: bytes) -> object:
    """As the controller reads a heartbeat: its first 4 bytes are the name beside it."""
    who, sealed = data[:4], data[4:]
    return open_heartbeat(KEY, PLACE, who, sealed)


def _json(kind: type) -> Decoder:
    return lambda data: decode_json(kind, data, kind.__name__)


TARGETS: dict[str, Target] = {
    "record": Target(records.unpack_record, (records.pack(OPENED), records.pack(JOINED))),
    "order": Target(records.unpack_order, (records.pack(OPENED),)),
    "entry": Target(records.unpack_entry, (records.pack(ENTRY),)),
    "beat": Target(records.unpack_heartbeat, (records.pack(BEAT),)),
    "assignment": Target(records.unpack_assignment, (records.pack(ASSIGNED),)),
    "journal line": Target(records.entry_from_json, (records.entry_to_json(ENTRY),)),
    "signed": Target(_signed, (KEY.sign(PLACE, records.pack(OPENED)),)),
    "numbered": Target(_numbered, (bytes(7) + b"\1" + records.pack(OPENED),)),
    "sender": Target(_sender, (b"3f2a" + seal_heartbeat(KEY, PLACE, BEAT, 1),)),
    "plan": Target(plan_from_json, (PLAN,)),
    "job.json": Target(_json(JobInfo), (JSON(JOB),)),
    "store.json": Target(_json(StoreAddress), (JSON(STORE),)),
    "job store": Target(_json(JobStore), (JSON(STORE),)),
    "result.json": Target(_json(Result), (b'{"exit_code":0,"reason":"done","ended_at":1.0}',)),
    "restart in process": Target(restarts.decode, (restarts.encode(RESTART),)),
    "log of a group": Target(ledger.decode, (ledger.encode(LOST),)),
    "barrier of a group": Target(lambda data: barriers.unpack(data, barriers.NewPlace), (STARTING,)),
    "monitor": Target(monitor.decode_order, (monitor.encode_order(monitor.NewRankOrder(iteration=1, rank=2)),)),
    "greeting on the liveness connection": Target(
        lambda data: decode(liveness._unpack_hello.decode, data, "a greeting"),
        (msgspec.msgpack.encode({"node": "n1", "incarnation": "3f2a", "nonce": bytes(32), "mac": bytes(32)}),),
    ),
    "published payload": Target(
        lambda data: directory.unpack(data, "1-0"),
        (directory.pack(directory.Published(ref=REF, replica="main-0", number=7)),),
        (TransportError,),
    ),
    "ledger of suspects": Target(decode_blames, (b'{"blames":[{"node":"n1"}]}',)),
    "pickle": Target(load_plain, tuple(pickle.dumps(DUMP, protocol) for protocol in (2, 4, 5))),
    "flight recorder": Target(lambda data: read_dump(data, 0), (pickle.dumps(DUMP, 4), JSON(DUMP))),
}  # fmt: skip


def inputs(samples: tuple[bytes, ...], count: int, seed: int) -> Iterator[bytes]:
    """Samples that were changed, cut, repeated and mixed; the same ones for the same seed."""
    chance = random.Random(seed)
    # Deep nesting, at which a recursive decoder would overflow its stack, and lengths without their items.
    yield from (b"", b"\xff" * 64, b"[" * 100_000, b'{"a":' * 50_000, b"\x91" * 100_000, b"\x81\xa1a" * 50_000)
    yield from samples
    for _ in range(max(0, count - 6 - len(samples))):
        data = bytearray(chance.choice(samples))
        for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
            at, end = chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)
            what = chance.randrange(7)
            if what == 0 and at < len(data):
                data[at] = chance.randrange(256)
            elif what == 1 and at < len(data):
                data[at] ^= 1 << chance.randrange(8)
            elif what == 2:
                data[at:at] = bytes(chance.choices(SIGNS, k=chance.randrange(1, 9)))
            elif what == 3:
                del data[min(at, end) : max(at, end)]
            elif what == 4:
                del data[at:]
            elif what == 5:
                data[at:at] = data[min(at, end) : max(at, end)]
            else:
                data[at:at] = chance.randbytes(chance.randrange(1, 17))
            del data[LONGEST:]
        yield bytes(data)


class Finding(NamedTuple):
    """An input that a decoder does not take as it should."""

    data: bytes
    what: str


def check(target: Target, data: bytes) -> Finding | None:
    """Feed one input."""
    began = time.process_time()  # not the wall's time: other processes may have the processor
    try:
        target.decode(data)
    except target.errors:
        pass
    except Exception as error:
        return Finding(data, f"raised {error!r}")
    took_s = time.process_time() - began
    return Finding(data, f"took {took_s:.1f} s") if took_s > SLOW_S else None


def fuzz(target: Target, count: int, seed: int) -> Finding | None:
    """The first input that is not taken as it should be; None: all were."""
    return next((found for data in inputs(target.samples, count, seed) if (found := check(target, data))), None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TARGETS)} (default: all)")
    parser.add_argument("--inputs", type=int, default=INPUTS, help="for each target (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--atheris", action="store_true", help="look for inputs by coverage")
    parser.add_argument("--corpus", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - TARGETS.keys():
        parser.error(f"no target {', '.join(sorted(unknown))}; there are: {', '.join(TARGETS)}")
    if chosen.corpus:
        by_coverage(TARGETS[chosen.names[0]], chosen.corpus, chosen.inputs, chosen.seed)
    if chosen.atheris:
        ended = [_search(name, chosen.inputs, chosen.seed) for name in chosen.names or TARGETS]
        return int(any(ended))
    failed = False
    for name in chosen.names or TARGETS:
        began = time.monotonic()
        found = fuzz(TARGETS[name], chosen.inputs, chosen.seed)
        took_s = time.monotonic() - began
        if found is None:
            print(f"{name}: {chosen.inputs} inputs in {took_s:.0f} s", flush=True)
        else:
            failed = True
            print(f"{name}: {found.what}, for {found.data!r} (seed {chosen.seed})", flush=True)
    return int(failed)


def _search(name: str, count: int, seed: int) -> int:
    """One target by coverage, in a process of its own, which libFuzzer ends. Returns its exit code."""
    with tempfile.TemporaryDirectory() as corpus:
        for number, sample in enumerate(TARGETS[name].samples):
            Path(corpus, str(number)).write_bytes(sample)
        options = ["--corpus", corpus, f"--inputs={count}", f"--seed={seed}"]
        return subprocess.run([sys.executable, "-m", "ci.fuzz", *options, name], check=False).returncode


def by_coverage(target: Target, corpus: str, count: int, seed: int) -> None:
    """With libFuzzer, beginning with the samples in the folder `corpus`; it ends the process."""
    atheris: Any = importlib.import_module("atheris")  # the extra `fuzz`; it has no types

    def one(data: bytes) -> None:
        if (found := check(target, data)) is not None:
            raise AssertionError(found.what)

    atheris.instrument_all()
    atheris.Setup([sys.argv[0], f"-runs={count}", f"-seed={seed % (1 << 32)}", f"-max_len={LONGEST}", corpus], one)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
