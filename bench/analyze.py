"""Reading clean logs for failures, against `grep -F` for the same texts; and a thousand of them, with the memory."""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Generator
from functools import partial
from pathlib import Path
from statistics import median

from bench.errors import PeerFailed, PeerMissing
from bench.processes import temporary_folder
from bench.tables import Target, in_turns, print_rows, print_target, print_targets
from bench.usage import spent_s
from nvrx_slurm.attribution.rules.catalogue import Catalogue, load_catalogue
from nvrx_slurm.attribution.scan import find_logs, scan
from nvrx_slurm.jobspec import env
from nvrx_slurm.util.clock import SystemClock

OURS, GREP = "scan", "grep -F -c -f literals"
ONE_BYTES, RANK_BYTES, RANKS = 512 << 20, 10 << 20, 1000
LEAST_MB_S, MOST_S, MOST_MB = 200.0, 60.0, 300.0
SOME_LINES = 20_000


def analyze(runs: int, peers: Path) -> None:
    """One log on one core, in turns with grep."""
    catalogue = load_catalogue()
    grep = shutil.which("grep")
    if grep is None:
        raise PeerMissing("grep is not here: apt install grep")
    with temporary_folder() as folder:
        log, literals = folder / "train.log", folder / "literals"
        write_log(log, ONE_BYTES, rank=0)
        literals.write_bytes(b"\n".join(sorted({text for rule in catalogue.rules for text in rule.literals})) + b"\n")
        ways = {OURS: partial(_scan_cpu_s, log, catalogue), GREP: partial(_grep_cpu_s, grep, literals, log)}
        ways[OURS]()  # from here on the patterns are compiled, and the file is in memory
        samples = in_turns(runs, ways)
        megabytes = log.stat().st_size / 1e6
        title = f"{megabytes:.0f} MB of clean log, {len(catalogue.rules)} rules, CPU time"
        print_rows(title, samples, unit="s", first=OURS)
        print_targets(samples, [Target("no slower than grep", GREP, (OURS,), at_most=1.0)])
        speed = megabytes / median(samples[OURS])
        print_target(f"≥ {LEAST_MB_S:.0f} MB/s on one core", speed, at_least=LEAST_MB_S)


def analyze_ranks(runs: int, peers: Path) -> None:
    """A thousand rank logs, 10 GB, once, in a process of its own, so that its memory is its own."""
    with temporary_folder() as folder:
        write_log(folder / "rank-0.out", RANK_BYTES, rank=0)
        for rank in range(1, RANKS):
            shutil.copyfile(folder / "rank-0.out", folder / f"rank-{rank}.out")
        argv = [sys.executable, "-m", "bench.analyze", str(folder)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PeerFailed(f"the scan exited with {done.returncode}: {done.stderr[-2000:]}")
    took_s, cpu_s, peak_mb = map(float, done.stdout.split())
    print(f"\n{RANKS:,} logs of {RANK_BYTES / 1e6:.0f} MB (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs)")
    print(f"  {took_s:.1f} s, {cpu_s:.1f} s of CPU time, {peak_mb:.0f} MB of memory at the peak")
    print_target(f"≤ {MOST_S:.0f} s", took_s, at_most=MOST_S)
    print_target(f"≤ {MOST_MB:.0f} MB", peak_mb, at_most=MOST_MB)


def write_log(path: Path, size: int, *, rank: int) -> None:
    """A log of a healthy rank, of at least `size` bytes: some thousand different lines, again and again."""
    lines = b"".join(f"{line}\n".encode() for line in _lines(random.Random(rank), rank))
    with path.open("wb") as file:
        while file.tell() < size:
            file.write(lines)


def _lines(chance: random.Random, rank: int) -> Generator[str, None, None]:
    """What Megatron, NCCL, tqdm and structured loggers say of a run without failures."""
    for step in range(SOME_LINES):
        stamp = f"2026-11-21 18:{step // 60 % 60:02}:{step % 60:02}"
        yield chance.choices(
            [
                f" [{stamp}] iteration {step:8d}/ 500000 | consumed samples: {step * 1024:12d} | elapsed time per "
                f"iteration (ms): {chance.uniform(400, 500):.1f} | learning rate: {chance.random() * 1e-4:.3E} "
                f"| lm loss: {chance.uniform(1, 3):.6E} | loss scale: 1.0 | grad norm: {chance.random():.3f} "
                "| number of skipped iterations:   0 | number of nan iterations:   0 |",
                f"{stamp},{step % 1000:03} - megatron.core.timers - INFO - rank {rank}: forward-backward "
                f"{chance.uniform(100, 300):.2f} ms, optimizer {chance.uniform(10, 30):.2f} ms",
                f"node17:12345:12399 [{rank % 8}] NCCL INFO Channel {step % 32:02}/0 : {step % 8}[{step % 8}] -> "
                f"{(step + 1) % 8}[{(step + 1) % 8}] via P2P/CUMEM/read",
                f"Epoch {step // 1000}: {step % 100}%|{'█' * (step % 10)}| {step}/500000 [00:{step % 60:02}<10:12, "
                f"{chance.uniform(5, 9):.2f}it/s, loss={chance.uniform(1, 3):.3f}]",
                f'{{"level":"info","ts":{1795283000 + step},"msg":"checkpoint shard saved","shard":{step % 64}}}',
            ],
            weights=[40, 20, 15, 15, 10],
        )[0]


def _scan_cpu_s(log: Path, catalogue: Catalogue) -> float:
    # CPU seconds, not time: "on one core" holds on a busy machine too.
    before = spent_s(resource.RUSAGE_SELF)
    _scan(log, catalogue)
    return spent_s(resource.RUSAGE_SELF) - before


def _grep_cpu_s(grep: str, literals: Path, log: Path) -> float:
    # By bytes (LC_ALL=C), not by characters: as fast as grep can be. Into a pipe: into /dev/null grep stops at the
    # first match.
    before = spent_s(resource.RUSAGE_CHILDREN)
    argv = [grep, "-F", "-c", "-f", str(literals), str(log)]
    done = subprocess.run(argv, capture_output=True, env=env.child_environment({"LC_ALL": "C"}), check=False)
    if done.returncode > 1:
        raise PeerFailed(f"grep exited with {done.returncode}: {done.stderr.decode()[-2000:]}")
    return spent_s(resource.RUSAGE_CHILDREN) - before


def _scan(path: Path, catalogue: Catalogue) -> None:
    read = scan(find_logs([path], None), catalogue)
    if read.problems or read.hits:
        raise PeerFailed(f"the logs are not clean: {read.problems or read.hits[0]}")


def _report(folder: Path) -> None:
    catalogue, clock = load_catalogue(), SystemClock()
    began = clock.monotonic()
    _scan(folder, catalogue)
    took_s, peak_bytes = clock.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(took_s, spent_s(resource.RUSAGE_SELF), peak_bytes / 1e6)


if __name__ == "__main__":
    _report(Path(sys.argv[1]))
