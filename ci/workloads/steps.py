"""A small training that goes on for as long as a flow needs it, and goes wrong where it is told to.

Standard library only, for whichever Python 3 a node has. A worker holds a lock of its rank while it lives: a second
one of that rank ends at once with `RANK_IS_TAKEN`, which no flow expects.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # that Python need not have us installed

from nvrx_slurm.workload import beat

ENV = os.environ
RANK, WORLD_SIZE = int(ENV["RANK"]), int(ENV["WORLD_SIZE"])
FOLDER = Path(ENV["NVRX_JOB_FOLDER"])
RANK_IS_TAKEN = 3
MEBIBYTE = (b"x" * 1023 + b"\n") * 1024


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small training that goes wrong where it is told to.")
    parser.add_argument("--steps", type=int, default=10, help="do so many at least")
    parser.add_argument("--step-time", type=float, default=0.05, metavar="SECONDS")
    parser.add_argument(
        "--until",
        action="append",
        default=[],
        metavar="'EVENT key=value …'",
        help="go on until the journal has such an entry (`times=2`: two of them); given again: and such a one",
    )
    parser.add_argument("--resume", action="store_true", help="keep the step on file, and go on from there")
    parser.add_argument("--fault", metavar="NAME@STEP", help=f"go wrong after that step: {', '.join(FAULTS)}")
    parser.add_argument("--ranks", help="which ranks go wrong, such as 1,2; default: all")
    parser.add_argument("--cycles", type=int, default=1, help="in how many first cycles they do")
    parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--saves", action="store_true", help="on SIGUSR1 keep the step on file, and end")
    parser.add_argument("--flood", type=int, default=0, metavar="MIB", help="print so much at each step")
    return parser.parse_args()


# ------------------------------------------------------------------------------------------- going wrong


def fail() -> NoReturn:
    """At the next quarter of a second: all who fail after the same step do so in the same moment."""
    time.sleep(-time.time() % 0.25)
    raise RuntimeError(f"rank {RANK} was told to fail")


def hang() -> NoReturn:
    while True:
        signal.pause()


def leave() -> NoReturn:
    """As a worker does that miscounts its data: the others wait for it for ever."""
    sys.exit(0)


def exhaust_memory() -> NoReturn:
    """More than the kernel lets this process have."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
    hoard = []
    while True:
        hoard.append(bytearray(64 << 20))


def crash() -> NoReturn:
    """Read where no memory is: SIGSEGV."""
    ctypes.string_at(0)
    raise AssertionError("address 0 can be read")


def diverge() -> NoReturn:
    """As a training does whose learning rate is too high."""
    loss = 1e308
    while math.isfinite(loss):
        loss *= 10
    loss -= loss
    raise FloatingPointError(f"loss is {loss}: training has diverged")


def fill_disk() -> NoReturn:
    """Save where no space is left."""
    with Path("/dev/full").open("wb", buffering=0) as checkpoint:
        checkpoint.write(b"weights")
    raise AssertionError("/dev/full has space left")


def lack_module() -> NoReturn:
    """Need what is not installed."""
    import_module("a_module_that_is_not_installed")
    raise AssertionError("it is installed")


FAULTS: dict[str, Callable[[], NoReturn]] = {
    "fail": fail,
    "hang": hang,
    "leave": leave,
    "exhaust_memory": exhaust_memory,
    "crash": crash,
    "diverge": diverge,
    "fill_disk": fill_disk,
    "lack_module": lack_module,
}


def go_wrong(options: argparse.Namespace, step: int) -> None:
    """Do what was asked for, if this rank, cycle and step are meant."""
    if not options.fault or int(ENV["NVRX_CYCLE"]) >= options.cycles:
        return
    name, _, when = options.fault.partition("@")
    if step == int(when) and (options.ranks is None or str(RANK) in options.ranks.split(",")):
        FAULTS[name]()


# ------------------------------------------------------------------------------------------- the other ranks


def hold_rank() -> IO[str]:
    """Lock this rank's file; the kernel lets go of it when this process ends, however it does."""
    held = (FOLDER / f"{ENV['NVRX_REPLICA']}-{RANK}.lock").open("w")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"rank {RANK} runs already", file=sys.stderr)
        sys.exit(RANK_IS_TAKEN)
    return held


def meet_peers() -> None:
    """Return once every rank of this cycle has connected to rank 0, as a process group does when it starts."""
    place = (ENV["MASTER_ADDR"], int(ENV["MASTER_PORT"]))
    if RANK > 0:
        while not _is_let_in(place):
            time.sleep(0.01)
        return
    # Rank 0 answers when all have come, so that no rank begins its first step alone.
    with socket.create_server(place, backlog=WORLD_SIZE) as door:
        peers = [door.accept()[0] for _ in range(WORLD_SIZE - 1)]
    for peer in peers:
        with peer:
            peer.sendall(b"!")


def _is_let_in(place: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(place) as door:
            return door.recv(1) == b"!"
    except OSError:  # rank 0 does not listen yet
        return False


# ------------------------------------------------------------------------------------------- how long it goes on


class Journal:
    """The job's journal, as far as it is written; `wanted`: entries, each `EVENT key=value …`."""

    def __init__(self, wanted: list[str]) -> None:
        self.path, self.read_to = FOLDER / "events.jsonl", 0
        self.missing = [_pattern(words) for words in wanted]

    def has_all(self) -> bool:
        """Read on; whether every wanted entry was found."""
        if self.missing and self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self.read_to)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # still being written
                    self.read_to += len(line)
                    self.missing = [pattern for pattern in self.missing if not _completes(pattern, json.loads(line))]
        return not self.missing


def _pattern(words: str) -> dict[str, str]:
    event, *pairs = words.split()
    return {"event": event, "times": "1", **dict(pair.split("=", 1) for pair in pairs)}


def _completes(pattern: dict[str, str], entry: dict[str, Any]) -> bool:
    """Count the entry if it fits; True with the last one that was missing."""
    if any(str(entry.get(key)) != value for key, value in pattern.items() if key != "times"):
        return False
    pattern["times"] = str(int(pattern["times"]) - 1)
    return pattern["times"] == "0"


class Checkpoint:
    """The step, on file. Rank 0 keeps it after each; a worker that is asked to save does so too, and ends."""

    def __init__(self, resumes: bool) -> None:
        self.path, self.resumes = FOLDER / f"{ENV['NVRX_REPLICA']}.step", resumes
        self.step = int(self.path.read_text()) if resumes and self.path.exists() else 0

    def keep(self, step: int) -> None:
        self.step = step
        if self.resumes and RANK == 0:
            self._save()

    def save_and_end(self, *_: object) -> NoReturn:
        self._save()
        # Not sys.exit: the signal may have come within anything, and nothing else must run now.
        os._exit(0)

    def _save(self) -> None:
        """Replaced as a whole: a worker may be killed at any moment."""
        fresh = self.path.with_suffix(f".{os.getpid()}")
        fresh.write_text(str(self.step))
        fresh.replace(self.path)


def main() -> None:
    options = parse()
    checkpoint, journal = Checkpoint(options.resume), Journal(options.until)
    if options.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.saves:
        signal.signal(signal.SIGUSR1, checkpoint.save_and_end)
    with hold_rank():
        meet_peers()
        first = step = checkpoint.step
        while step < first + options.steps or not journal.has_all():
            time.sleep(options.step_time)
            step += 1
            for _ in range(options.flood):
                sys.stdout.buffer.write(MEBIBYTE)
            beat(step=step)
            checkpoint.keep(step)
            go_wrong(options, step)
        print(f"rank {RANK} of {WORLD_SIZE} is done after step {step}")


if __name__ == "__main__":
    main()
