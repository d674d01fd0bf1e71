"""`python -m bench [NAME…]`: what `make bench` calls."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import click

from bench.processes import nothing_left
from nvrx_slurm.errors import EXIT_INTERRUPTED, NvrxError

PEERS = Path(__file__).parent.parent / ".venv-peers" / "bin"

# name → (function of (runs, peers), what it measures)
BENCHMARKS: dict[str, tuple[str, str]] = {
    "worker_recovery": ("recovery:worker_recovery", "A worker is killed: until all workers run again."),
    "node_recovery": ("recovery:node_recovery", "A node is killed: until its ranks run on the spare."),
    "torch_recovery": ("torch_recovery:torch_recovery", "A torch worker is killed: until the first step after it."),
    "torch_node_recovery": ("torch_recovery:torch_node_recovery", "The same for a node, onto a spare."),
    "warm_start": ("warm:warm_start", "A worker forked from a warm process, against a bare fork and a cold start."),
    "metadata": ("warm:metadata", "8 torch workers start: file system calls and CPU, cold and warm."),
    "warm_memory": ("warm:warm_memory", "8 torch workers at their first step: memory, cold and warm."),
    "detection": ("detection:detection", "A worker dies, an agent dies, a node freezes: until it is known."),
    "saturated": ("detection:saturated", "Every core busy for as many minutes as --runs says: no node is lost."),
    "decision": ("decision:decision", "Attribution and rendezvous at once against each alone."),
    "round": ("round:rounds", "A rendezvous of 256 to 2,000 simulated nodes; how it grows."),
    "teardown": ("teardown:teardown", "64 workers of which 8 ignore SIGTERM are stopped: phase by phase."),
    "beat": ("beat:beats", "One sign of progress: shared memory against NVRx's socket."),
    "heartbeats": ("heartbeats:heartbeats", "100 to 10,000 nodes send heartbeats: what it costs; silence to reap."),
    "connections": (
        "connections:connections",
        "1,000 and 10,000 agents connect to one controller, beside a flood too.",
    ),
    "startup": ("startup:startup", "nvrx-slurm --help against python -c pass."),
    "flow": ("flow:flow", "A flow through nvrx-slurm ci run against the same job by hand, on a real Slurm."),
    "simulation": ("simulation:simulation", "Virtual time against looptime's; histories a minute."),
    "analyze": ("analyze:analyze", "Clean logs are read for failures, against grep -F for the same texts."),
    "findings": ("findings:findings", "1,024 ranks fail: read by 128 agents and weighed, against one node."),
    "analyze_ranks": ("analyze:analyze_ranks", "A thousand rank logs, 10 GB: time and memory."),
    "submit": ("submit:submit", "nvrx-slurm submit against bare submitit, on a real Slurm."),
    "inprocess": ("inprocess:inprocess", "A wrapped function fails: until its last rank is in it again."),
    "inprocess_steady": ("inprocess_steady:steady", "What a wrapped function costs while nothing fails."),
    "inprocess_scale": ("inprocess_scale:scale", "A restart of 256 to 16,384 simulated ranks; how it grows."),
    "transport": ("transport.speed:transport", "A payload of 1 KiB to 64 MiB, from one process to another."),
    "transport_sick": ("transport.sick:transport_sick", "8 readers on 4 ports of which 1 says nothing."),
    "report": ("report:report", "1,000 nodes, 100,000 entries: page, trace, metrics; a page of 1,000 jobs."),
    "live_readers": ("live_readers:live_readers", "metrics --listen and top of a job of 1,000 ranks: CPU."),
    "attrsvc": ("attrsvc:attrsvc", "A cached answer of attrsvc against a bare Starlette; its health under load."),
}

ON_DEMAND = frozenset({"analyze_ranks", "findings"})
"""Run only when named: they take 10 GB and 2 GB of disk."""


@click.command(epilog="Benchmarks: " + " ".join(f"{name}: {about[1]}" for name, about in BENCHMARKS.items()))
@click.argument("names", nargs=-1, type=click.Choice(list(BENCHMARKS)), metavar="[NAME]…")
@click.option("--runs", default=5, show_default=True, type=click.IntRange(min=1), help="How often each is measured.")
@click.option("--peers", default=PEERS, type=click.Path(path_type=Path), help="The bin folder torchrun is in.")
def main(names: tuple[str, ...], runs: int, peers: Path) -> int:
    """Measure NAME… (all of them but analyze_ranks and findings, if none is named) against its peers, in one run."""
    failed = 0
    for name in names or [name for name in BENCHMARKS if name not in ON_DEMAND]:
        print(f"\n=== {name}: {BENCHMARKS[name][1]}", flush=True)
        module, function = BENCHMARKS[name][0].split(":")
        try:
            getattr(importlib.import_module(f"bench.{module}"), function)(runs, peers)
        except NvrxError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failed = error.exit_code
    return failed


if __name__ == "__main__":
    try:
        with nothing_left():
            code = main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        code = EXIT_INTERRUPTED
    sys.exit(code)
