"""A failure of 1,024 ranks with 2 MB of log each: what an agent's part costs, what the broker's costs, and what it
costs to read all logs on one node.

CPU time, since this machine has other work and fewer cores than 128 nodes. An agent's part is that of its process
for 8 ranks, from its start. The findings of the other nodes are made in this process, by the peer's reading.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import threading
from pathlib import Path
from statistics import median

import msgspec

from bench.analyze import write_log
from bench.errors import PeerFailed
from bench.processes import temporary_folder
from bench.tables import Target, print_rows, print_target, print_targets
from bench.usage import spent_s
from nvrx_slurm.agent.log_reader import COMMAND
from nvrx_slurm.attribution.analyze.analysis import analyze_logs, logs_of
from nvrx_slurm.attribution.analyze.evidence import read_logs
from nvrx_slurm.attribution.analyze.gathering import ReceivedFindings, analyze_gathered
from nvrx_slurm.attribution.analyze.node_findings import encoded, found_in, joined
from nvrx_slurm.attribution.rules.catalogue import load_catalogue
from nvrx_slurm.attribution.scan import LogFile
from nvrx_slurm.attribution.scan.prefilter import prefilter_of
from nvrx_slurm.journal.verdicts import FINDINGS_LENGTH_BYTES, AgentFindings, Failed, FailureKey, Inquiry
from nvrx_slurm.util.clock import SystemClock

NODES, WORKERS, RANK_BYTES = 128, 8, 2_000_000
AGENT, BROKER, BOTH, PEER = "an agent's part", "the broker's part", "agent and broker", "reading all on one node"
MOST_S = 2.0
FIRST_RANK = 517

CAUSE = """\
Traceback (most recent call last):
  File "/work/train.py", line 31, in main
    loss = step(batch)
  File "/work/model.py", line 88, in step
    lr = config["lr"]
KeyError: 'lr'
"""
CONSEQUENCE = (
    "[rank{rank}]:[E1121 18:20:{second:02}.400001 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective"
    " operation timeout: WorkNCCL(SeqNum=1594, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for"
    " 600029 milliseconds\n"
    "[rank{rank}]: Traceback (most recent call last):\n"
    '[rank{rank}]:   File "/work/train.py", line 31, in main\n'
    "[rank{rank}]:     loss = step(batch)\n"
    "[rank{rank}]: torch.distributed.DistBackendError: NCCL communicator was aborted on rank {rank}.\n"
)


def findings(runs: int, peers: Path) -> None:
    """Both ways must give the same verdict."""
    catalogue = load_catalogue()
    prefilter_of(catalogue)  # the broker's process does it before anything fails
    with temporary_folder() as folder:
        inquiry = _failure(folder)
        logs = logs_of(inquiry)
        of_nodes: dict[str, list[LogFile]] = {node: [] for node in inquiry.nodes}
        for log in logs:
            of_nodes[log.node or ""].append(log)
        samples: dict[str, list[float]] = {BOTH: [], AGENT: [], BROKER: [], PEER: []}
        samples[AGENT] = [_agent_cpu_s(folder, node) for node in range(runs + 1)][1:]  # the first fills caches

        # All logs, read once: the peer's work, from which the findings of all nodes are made.
        began = spent_s(resource.RUSAGE_SELF)
        parts = {node: read_logs(own, catalogue, threading.Event()) for node, own in of_nodes.items()}
        read = analyze_logs(inquiry, catalogue, logs=logs, read=lambda *_: joined(parts.values())).attribution
        samples[PEER].append(spent_s(resource.RUSAGE_SELF) - began)
        received, sizes = ReceivedFindings(), list[int]()
        for node, part in parts.items():
            data = encoded(found_in(node, folder, *part, catalogue)) or b""
            sizes.append(len(data))
            received.put(AgentFindings(folder=str(folder), node=node, whole=True, data=data))

        clock = SystemClock()
        for _ in range(runs):
            began = spent_s(resource.RUSAGE_SELF)
            found = analyze_gathered(
                inquiry,
                catalogue,
                received,
                logs=logs_of(inquiry),
                whole=True,
                stop=threading.Event(),
                clock=clock,
                deadline=clock.monotonic() + 600.0,
            ).attribution
            samples[BROKER].append(spent_s(resource.RUSAGE_SELF) - began)
    assert found.read is not None
    if msgspec.structs.replace(found, read=msgspec.structs.replace(found.read, agents=0)) != read:
        raise PeerFailed(f"by findings: {found}; by the logs: {read}")
    samples[BOTH] = [agent + broker for agent, broker in zip(samples[AGENT], samples[BROKER], strict=True)]
    print(f"{read.verdict}; {sum(sizes) / 1e3:,.0f} kB of findings, {max(sizes) / 1e3:.1f} kB of a node at most")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    title = f"{NODES * WORKERS:,} ranks on {NODES} nodes, {RANK_BYTES / 1e6:.0f} MB of log each, CPU time"
    print_rows(title, samples, unit="s", first=BOTH)
    print_targets(samples, [Target("a tenth of reading all", PEER, (BOTH,), at_most=0.1)])
    decided_s = median(samples[BOTH])
    print_target(f"≤ {MOST_S:.0f} s", decided_s, at_most=MOST_S)


def _failure(folder: Path) -> Inquiry:
    """One rank raises; the others time out."""
    write_log(folder / "rank-0.err", RANK_BYTES, rank=0)
    for rank in range(1, NODES * WORKERS):
        shutil.copyfile(folder / "rank-0.err", folder / f"rank-{rank}.err")
    for rank in range(NODES * WORKERS):
        own = CAUSE if rank == FIRST_RANK else CONSEQUENCE.format(rank=rank, second=30 + rank % 8)
        with (folder / f"rank-{rank}.err").open("a") as file:
            file.write(own)
    node = f"n{FIRST_RANK // WORKERS}"
    return Inquiry(
        key=FailureKey(job="", generation=0, replica="main-0", cycle=0, rank=FIRST_RANK),
        paths=(str(folder),),
        failed=Failed(cause="exit code 1", node=node, rank=FIRST_RANK, exit_code=1),
        nodes=tuple(f"n{number}" for number in range(NODES)),
        workers_per_node=WORKERS,
    )


def _agent_cpu_s(folder: Path, node: int) -> float:
    # One agent's process, from its start to its end: the imports are a part of what it costs.
    ranks = list(range(node * WORKERS, (node + 1) * WORKERS))
    asked = msgspec.json.encode({"node": f"n{node}", "folder": str(folder), "ranks": ranks})
    before = spent_s(resource.RUSAGE_CHILDREN)
    done = subprocess.run(COMMAND, input=asked + b"\n\n", capture_output=True, check=False)
    if done.returncode != 0 or len(done.stdout) <= FINDINGS_LENGTH_BYTES:
        raise PeerFailed(f"the process that reads a node's logs: {done.stderr.decode()[-2000:]}")
    return spent_s(resource.RUSAGE_CHILDREN) - before
