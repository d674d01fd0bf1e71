"""What a warm process saves on one node, where otherwise each worker imports torch: time, calls, CPU, memory."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from bench.errors import PeerMissing
from bench.processes import JsonChild, interpreter, temporary_folder
from bench.tables import Target, print_rows, print_target, print_targets
from bench.worker_registry import WorkerRegistry
from nvrx_slurm.agent.warm import AHEAD_AFTER_S
from nvrx_slurm.util.clock import SystemClock

HERE = Path(__file__).parent
IMPORTS, TRAINING, FORKS = HERE / "torch_import.py", HERE / "torch_worker.py", HERE / "bare_fork_server.py"
MODULES = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo")
"""What a user names. `torch._dynamo` is what each optimizer of torch imports when it is made."""

WORKERS = 8
WAIT_S = 240.0
SETTLE_S = 1.0
WARM_RUNS = 2  # a warm start takes milliseconds: more of them cost little and steady the median
COLD, WARM, FLOOR = "nvrx-slurm, cold", "nvrx-slurm, warm", "bare fork server"
CALLS = ("open", "openat", "stat", "lstat", "newfstatat", "statx")
_ROW = re.compile(r"^\s*[\d.]+\s+[\d.]+\s+\d+\s+(?P<calls>\d+)\s+(?:\d+\s+)?(?P<name>\w+)$", re.MULTILINE)


def warm_start(runs: int, peers: Path) -> None:
    """One worker, and 8 at once."""
    python, clock = str(interpreter(["torch"], peers)), SystemClock()
    for count, most_s in ((1, 0.025), (WORKERS, 0.060)):
        samples: dict[str, list[float]] = {WARM: [], FLOOR: [], COLD: []}
        with closing(WorkerRegistry()) as registry:
            command = (python, str(IMPORTS), *registry.address)
            with _one_node(command) as warm, _one_node(command) as cold, _fork_server(python) as floor:
                warm.ask({"warm": [count, *MODULES]})
                # A warm start takes milliseconds, a cold one seconds: not each warm run has a cold one beside it.
                for run in range(runs * WARM_RUNS):
                    clock.sleep(AHEAD_AFTER_S + SETTLE_S)  # until the next workers are forked
                    samples[WARM].append(_start(warm, registry, count))
                    samples[FLOOR].append(_fork(floor, count))
                    if run % WARM_RUNS == 0:
                        samples[COLD].append(_start(cold, registry, count))
        which = "a worker" if count == 1 else f"{count} workers at once"
        print_rows(f"{which}: the order → torch is imported", samples, unit="ms", first=FLOOR)
        print_targets(samples, [Target(f"≤ {most_s * 1000:g} ms, in s", None, (WARM,), at_most=most_s)])


def metadata(runs: int, peers: Path) -> None:
    """8 workers of a training start: calls that a shared file system answers, and CPU seconds."""
    if shutil.which("strace") is None:
        raise PeerMissing("strace is not there; install it with: apt-get install strace")
    python = str(interpreter(["torch"], peers))
    counted, used = {}, {}
    for name in (COLD, WARM):
        with temporary_folder() as room:
            report = room / "strace"
            _first_start(python, name, ("strace", "-f", "-c", "-o", str(report), "-e", f"trace={','.join(CALLS)}"))
            counted[name] = {row["name"]: int(row["calls"]) for row in _ROW.finditer(report.read_text())}
        used[name] = [_first_start(python, name).cpu_s for _ in range(runs)]
    for name, calls in counted.items():
        each = ", ".join(f"{call} {calls[call]:,}" for call in CALLS if call in calls)
        print(f"{name}: {sum(calls[call] for call in CALLS if call in calls):,} calls ({each})", flush=True)
    cold, warm = (sum(counted[name][call] for call in CALLS if call in counted[name]) for name in (COLD, WARM))
    print_target("≥ 6 × fewer calls", cold / warm, at_least=6.0)
    print_rows(f"CPU seconds until the first step of {WORKERS} workers", used, unit="s", first=COLD)
    print_targets(used, [Target("≥ 3 × less", WARM, (COLD,), at_least=3.0)])


def warm_memory(runs: int, peers: Path) -> None:
    """8 workers of a training, at their first step: their share of the memory, and the warm process's."""
    python = str(interpreter(["torch"], peers))
    starts = {name: [_first_start(python, name) for _ in range(runs)] for name in (COLD, WARM)}
    for name, each in starts.items():
        workers = sorted(start.pss_bytes for start in each)[runs // 2] / 1e6
        beside = sorted(start.warm_process_bytes for start in each)[runs // 2] / 1e6
        print(f"{name}: {workers:.0f} MB of {WORKERS} workers, {beside:.0f} MB of the warm process (PSS)", flush=True)
    total = {
        name: sorted(start.pss_bytes + start.warm_process_bytes for start in each)[runs // 2]
        for name, each in starts.items()
    }
    print_target("≤ 0.5 ×, the warm process included", total[WARM] / total[COLD], at_most=0.5)


# ----------------------------------------------------------------------------------------------------- one node


@dataclass(slots=True)
class FirstStart:
    """What the first start of a node's workers took."""

    cpu_s: float = 0.0
    pss_bytes: int = 0
    warm_process_bytes: int = 0


@contextlib.contextmanager
def _one_node(command: Sequence[str], prefix: Sequence[str] = ()) -> Iterator[JsonChild]:
    """A process of `one_node.py`."""
    node = JsonChild("a node", [*prefix, sys.executable, "-m", "bench.one_node", *command])
    try:
        yield node
    finally:
        node.end()


def _start(node: JsonChild, registry: WorkerRegistry, count: int) -> float:
    """Seconds from the first order until the last worker has imported torch."""
    began: float = min(node.ask({"spawn": count})["ordered"].values())
    world = registry.wait_world(count, timeout_s=WAIT_S, after=began)
    node.ask({"stop": True})
    return max(worker.started for worker in world.values()) - began


def _first_start(python: str, name: str, prefix: Sequence[str] = ()) -> FirstStart:
    """Start a node and 8 workers of a training on it, look at them at their first step, and end it all."""
    start = FirstStart()
    with temporary_folder() as room, closing(WorkerRegistry()) as registry:
        command = (python, str(TRAINING), f"{room}/checkpoint.pt", *registry.address)
        with _one_node(command, prefix) as node:
            process = node.ask({"warm": [WORKERS, *MODULES]})["process"] if name == WARM else None
            node.ask({"spawn": WORKERS})
            world = registry.wait_world(WORKERS, timeout_s=WAIT_S)
            start.pss_bytes = sum(_pss_bytes(worker.pid) for worker in world.values())
            start.warm_process_bytes = _pss_bytes(process) if process is not None else 0
            node.ask({"stop": True})
            start.cpu_s = node.finish()["cpu_s"]
    return start


def _pss_bytes(pid: int) -> int:
    """Its proportional share of memory: a page that n processes map counts 1/n in each."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


# ----------------------------------------------------------------------------------------------------- the floor


@contextlib.contextmanager
def _fork_server(python: str) -> Iterator[subprocess.Popen[bytes]]:
    argv = [python, "-W", "ignore", str(FORKS), *MODULES]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def _fork(server: subprocess.Popen[bytes], count: int) -> float:
    assert server.stdin is not None
    assert server.stdout is not None
    began = SystemClock().monotonic()
    server.stdin.write(b"%d" % count)
    server.stdin.flush()
    return max([float(server.stdout.readline()) for _ in range(count)]) - began
