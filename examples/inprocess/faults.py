"""Faults on demand, each of which really happens, once: `--fault raise:1:60` is one of rank 1, after step 60."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn


def _raise() -> NoReturn:
    raise RuntimeError("this went wrong")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    threading.Event().wait()


KINDS: dict[str, Callable[[], None]] = {"raise": _raise, "kill": _kill, "hang": _hang}


class Fault(NamedTuple):
    """What happens, to the process that began as this rank, after which step."""

    kind: str
    rank: int
    step: int


def fault(text: str) -> Fault:
    """Reads KIND:RANK:STEP. Raises ArgumentTypeError, which argparse reports."""
    kind, *numbers = text.split(":")
    if kind not in KINDS or len(numbers) != 2 or not all(map(str.isdecimal, numbers)):
        raise argparse.ArgumentTypeError(f"{text} is not KIND:RANK:STEP, where KIND is one of {', '.join(KINDS)}")
    rank, step = map(int, numbers)
    return Fault(kind, rank, step)


def parser() -> argparse.ArgumentParser:
    """One that knows `--fault`, which may be given more than once."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    what = f"what happens once to the process that began as this rank; KIND is one of {', '.join(KINDS)}"
    parser.add_argument("--fault", type=fault, action="append", default=[], metavar="KIND:RANK:STEP", help=what)
    return parser


class Faults:
    """This process's part of what was asked for. It outlives restarts of the function: nothing happens twice.

    In a process that a launcher has started anew nothing happens any more.
    """

    def __init__(self, asked: Sequence[Fault]) -> None:
        rank, restarts = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._to_come = {each.step: each for each in asked if each.rank == rank and not restarts}

    def after(self, step: int) -> None:
        """What is due after this step happens now."""
        if due := self._to_come.pop(step, None):
            print(f"the process that began as rank {due.rank}: {due.kind} after step {step}", flush=True)
            KINDS[due.kind]()
