"""A contestant: its carrier in two processes, a producer and a reader, that do as they are told."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from select import select
from typing import IO, Any

from bench.errors import BenchTimeout, PeerFailed
from nvrx_slurm.jobspec import env
from nvrx_slurm.util.processes import dies_with_parent

ROOT = Path(__file__).parent.parent.parent
STEP_S = 120.0


@dataclass(frozen=True, slots=True, eq=False)
class Contestant:
    """`carrier`: its module; `needs`: what its interpreter must be able to import; `options`: for the carrier."""

    name: str
    carrier: str
    needs: tuple[str, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


class Process:
    """A child that answers each line of JSON with one."""

    def __init__(
        self, name: str, python: Path, module: str, *arguments: str, log: Path, environment: Mapping[str, str]
    ) -> None:
        self._name, self._log = name, log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(python), "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=ROOT,
                env=env.child_environment({"PYTHONPATH": str(ROOT), **environment}),
                preexec_fn=dies_with_parent(signal.SIGKILL),
                bufsize=0,
            )

    def ask(self, order: Any) -> Any:
        self.order(order)
        return self.answer()

    def order(self, order: Any) -> None:
        _pipe(self._process.stdin).write(f"{json.dumps(order)}\n".encode())

    def answer(self) -> Any:
        """Raises BenchTimeout, and PeerFailed where the process has ended."""
        stdout, said, deadline = _pipe(self._process.stdout), bytearray(), time.monotonic() + STEP_S
        while not said.endswith(b"\n"):
            if not select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise BenchTimeout(f"{self._name}: no answer in {STEP_S:.0f} s; {self._said}")
            if not (more := stdout.read(1 << 16)):
                raise PeerFailed(f"{self._name} has ended; {self._said}")
            said += more
        return json.loads(said)

    def end(self) -> None:
        """With the end of its orders it ends by itself, and removes what it has made."""
        _pipe(self._process.stdin).close()
        try:
            self._process.wait(STEP_S / 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _pipe(self._process.stdout).close()

    @property
    def _said(self) -> str:
        return f"its log ends with:\n{self._log.read_text(errors='replace')[-2000:]}"


class Pair:
    """A contestant at one size. `writes` and `reads`: seconds of each of a turn's."""

    def __init__(self, contestant: Contestant, python: Path, size: int, count: int, room: Path) -> None:
        self._processes: list[Process] = []
        self._name = contestant.name
        self._arguments = (python, "bench.transport.side", contestant.carrier)
        self._more: dict[str, Any] = {
            "log": room / f"{contestant.carrier}.log",
            "environment": contestant.environment,
        }
        given = {"size": size, "count": count, "options": dict(contestant.options)}
        self._producer, given["where"] = self._start("producer", given)
        self._reader, _ = self._start("reader", given)

    def turn(self) -> tuple[list[float], list[float]]:
        """As many payloads as there is room for are written, then read: seconds of each write, and of each read."""
        written = self._producer.ask(None)
        return written["took"], self._reader.ask(written["refs"])["took"]

    def end(self) -> None:
        for process in reversed(self._processes):
            process.end()

    def _start(self, role: str, given: dict[str, Any]) -> tuple[Process, Any]:
        process = Process(f"{self._name}, {role}", *self._arguments, role, **self._more)
        self._processes.append(process)
        return process, process.ask(given)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
