"""The short job of `doctor --probe`: its script, the wait for its end, and what its nodes' facts mean for a job."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from nvrx_slurm.cluster.base import folder_name
from nvrx_slurm.cluster.node_probe import SEEN_S, NodeFacts
from nvrx_slurm.cluster.queue_place import QueueReporter
from nvrx_slurm.cluster.site_checks import SiteCheck, judged
from nvrx_slurm.cluster.slurm import SlurmCluster
from nvrx_slurm.errors import SubmissionRefused
from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.jobspec.plan import Plan, plan
from nvrx_slurm.jobspec.script import sbatch_flags, step_flags
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.durations import words

TIME_LIMIT_S, POLL_S, LATE_S = 120.0, 0.5, 10.0
NAME, FACTS = "nvrx-slurm-doctor", "*.facts"
# These would hold the probe back, or send mail of it; `requeue` contradicts its `no-requeue`.
_NOT_FOR_A_PROBE = ("begin", "deadline", "hold", "mail-type", "mail-user", "time-min", "requeue")

LONGEST_SKEW_S, LONGEST_WRITE_S, LONGEST_SEEN_S = 1.0, 0.1, 3.0
LEAST_SHM_BYTES, LEAST_TMP_BYTES, LEAST_FILES = 1 << 30, 1 << 30, 4096


def probe_script(spec: JobSpec, *, nodes: int, folder: Path, python: str) -> str:
    """The script of a job on so many nodes, with the `slurm` block and the `setup` lines of that job."""
    extra = {flag: value for flag, value in spec.slurm.extra.items() if flag not in _NOT_FOR_A_PROBE}
    slurm = replace(spec.slurm, time=TIME_LIMIT_S, array=None, dependency=None, extra=extra | {"no-requeue": True})
    small = replace(
        spec,
        name=NAME,
        command=("true",),
        roles={},
        nodes=nodes,
        min_nodes=None,
        spares=0,
        min_spares=None,
        slurm=slurm,
    )
    where = f'{shlex.quote(str(folder.absolute()))}/"$SLURM_JOB_ID"'
    srun = ["srun", "--mpi=none", "--export=ALL", "--kill-on-bad-exit=0", f"--nodes={nodes}", f"--ntasks={nodes}"]
    flags = "\n".join(f"#SBATCH {flag}" for flag in sbatch_flags(small, plan(small, folder=folder)))
    step = " ".join([*srun, "--ntasks-per-node=1", *step_flags(small), shlex.quote(python), "-P"])
    setup = "\n".join(spec.setup)
    # `:` ends the flags: sbatch reads them up to the first command, and a line of `setup` may look like one.
    return f"#!/bin/bash\n{flags}\n:\n{setup}\nexec {step} -m nvrx_slurm.cluster.node_probe {where} {nodes}\n"


def run_probe(
    script: str, *, nodes: int, folder: Path, timeout_s: float, say: Callable[[str], None], clock: Clock | None = None
) -> tuple[list[NodeFacts], str]:
    """Submit it and wait for its end. Returns the facts of the nodes that have reported, and in words why some have
    not. A job that takes longer, or whose wait is interrupted, is cancelled; of one that went well no file stays.

    Raises what a submission raises, unless Slurm refuses the job: that is what a probe is for.
    """
    cluster, clock = SlurmCluster(), clock or SystemClock()
    try:
        job_id = cluster.submit(script, folder=folder, name=NAME)
    except SubmissionRefused as refused:
        return [], str(refused)
    where = folder / folder_name(job_id)
    say(f"job {job_id} probes {nodes} nodes, in {where}")
    queue, deadline, problem = QueueReporter(job_id, say), clock.monotonic() + timeout_s, ""
    try:
        while not (state := cluster.states([job_id])[job_id]).terminal:
            # The end of the job is not awaited: it may be COMPLETING for a while, and says nothing more.
            if len(list(where.glob(FACTS))) == nodes:
                break
            if clock.monotonic() > deadline:
                problem = f"the job is {state} after {words(timeout_s)}"
                if queue.place is not None and state == "PENDING":
                    problem += f": {queue.place.describe(clock.wall())}"
                break
            if state == "PENDING":
                queue.look()
            clock.sleep(POLL_S)
        late = clock.monotonic() + LATE_S  # a shared folder may show files late
        while not problem and len(list(where.glob(FACTS))) < nodes and clock.monotonic() < late:
            clock.sleep(POLL_S)
    except BaseException:
        cluster.cancel(job_id)
        raise
    if problem:
        cluster.cancel(job_id)
    facts = [msgspec.json.decode(path.read_bytes(), type=NodeFacts) for path in sorted(where.glob(FACTS))]
    output = folder / f"slurm-{folder_name(job_id)}.out"
    if len(facts) == nodes:
        shutil.rmtree(where, ignore_errors=True)
        output.unlink(missing_ok=True)
        return facts, ""
    if not problem:
        with contextlib.suppress(OSError):
            problem = "; ".join(output.read_text(errors="replace").strip().splitlines()[-3:])
    return facts, f"{problem or 'no word why'} (see {output})"


def check_nodes(
    facts: Sequence[NodeFacts], plan: Plan, spec: JobSpec, *, nodes: int, problem: str
) -> list[SiteCheck]:
    """What the nodes' facts mean for the job."""
    some = f"{len(facts)} of {nodes} nodes have reported: {problem}"
    start = judged(
        "probe", is_well=len(facts) >= nodes, by="you", level="fail",
        seen=some if len(facts) < nodes else f"{nodes} nodes: {', '.join(each.node for each in facts)}",
        effect="a job of the same settings would not start there, or not be seen from here",
        todo="mend what Slurm says; the folder of the jobs must be shared, and this Python be on every node",
    )  # fmt: skip
    if not facts:
        return [start]
    subjects = (_network, _files, _software, _limits)
    return [start, *(check for subject in subjects for check in subject(facts, plan, spec))]


def _network(facts: Sequence[NodeFacts], plan: Plan, spec: JobSpec) -> Iterator[SiteCheck]:
    pairs = [(each.node, peer) for each in facts for peer in each.peers]
    if not pairs:
        return
    closed = [f"{node} → {peer.peer} ({peer.error})" for node, peer in pairs if peer.tcp_s is None]
    slowest_s = max(peer.tcp_s or 0.0 for _, peer in pairs)
    within = f"{len(pairs)} connections, within {slowest_s * 1e3:.1f} ms"
    yield judged(
        "TCP", is_well=not closed, by="site", level="fail",
        seen=f"refused or lost: {', '.join(closed[:4])}" if closed else within,
        effect="agents do not reach the store and the controller: the job does not start",
        todo="let the nodes of a job reach each other on all ports above 1024",
    )  # fmt: skip
    lost = [f"{node} → {peer.peer}" for node, peer in pairs if not peer.udp]
    yield judged(
        "UDP", is_well=not lost, by="site",
        seen=f"lost: {', '.join(lost[:4])}" if lost else "all datagrams came back",
        effect="the kernel of a lost node gets no fence datagram: its ranks run elsewhere only after"
        f" {words(plan.fault_tolerance.gives_away_after_s)}",
        todo="let datagrams pass between the nodes",
    )  # fmt: skip
    skew_s = max((abs(peer.skew_s) for _, peer in pairs if peer.skew_s is not None), default=0.0)
    is_late = skew_s > LONGEST_SKEW_S
    yield judged(
        "clocks", is_well=not is_late, by="site",
        seen=f"up to {skew_s:.1f} s apart" if is_late else f"at most {skew_s * 1e3:.0f} ms apart",
        effect="lines of the merged log, and steps of ranks, are in a wrong order; munge refuses 300 s",
        todo="run chronyd on the nodes",
    )  # fmt: skip
    loopback = [each.node for each in facts if each.names and all(name.startswith("127.") for name in each.names)]
    unreachable = [*loopback, *(each.node for each in facts if not each.names)]
    named = ", ".join(f"{each.node} is {each.names[0]}" for each in facts[:4] if each.names)
    yield judged(
        "host names", is_well=not unreachable, by="site",
        seen=f"no address, or the loopback: {', '.join(unreachable[:4])}" if unreachable else named,
        effect="servers listen at the address of the default route, which may be the slower network",
        todo="give each node's name its address, in DNS or /etc/hosts",
    )  # fmt: skip


def _files(facts: Sequence[NodeFacts], plan: Plan, spec: JobSpec) -> Iterator[SiteCheck]:
    peers = [peer for each in facts for peer in each.peers if peer.tcp_s is not None]
    write_s = statistics.median(each.write_s for each in facts)
    is_slow = write_s > LONGEST_WRITE_S
    taken = f"create, sync and rename take {write_s * 1e3:.1f} ms"
    yield judged(
        "shared folder", is_well=not is_slow, by="you",
        seen=f"a small file takes {write_s * 1e3:.0f} ms" if is_slow else taken,
        effect="the journal's copy and the logs lag behind; decisions do not wait for them",
        todo="put the folder of the jobs on a faster file system: --folder",
    )  # fmt: skip
    late_s = max((SEEN_S if peer.seen_after_s is None else peer.seen_after_s for peer in peers), default=0.0)
    if late_s > LONGEST_SEEN_S:
        yield SiteCheck(
            part="new files", level="warn", seen=f"seen by other nodes after {late_s:.1f} s, or later", by="site",
            effect="`status` and `logs` are as old as that, and so are `lease` and `progress.iteration_file`",
            todo="mount it with actimeo=3 or shorter (nfs(5))",
        )  # fmt: skip
    elif peers:
        yield SiteCheck(part="new files", seen=f"seen by other nodes within {late_s * 1e3:.0f} ms")
    if not all(each.flock for each in facts):
        yield SiteCheck(
            part="flock", level="warn", seen="the file system knows no locks", by="site",
            effect="the ledger of suspect nodes and in-process file stores do without: two writers may meet",
            todo="mount Lustre with -o flock",
        )  # fmt: skip
    elif any(peer.lock_is_seen is False for peer in peers):  # the lock works on one node only
        yield SiteCheck(
            part="flock", level="warn", seen="a lock is not seen by other nodes", by="site",
            effect="the ledger of suspect nodes and in-process file stores of several nodes: two writers may meet",
            todo="mount Lustre with -o flock, NFS without nolock and local_lock",
        )  # fmt: skip
    else:
        yield SiteCheck(part="flock", seen="locks are seen by other nodes" if peers else "there are locks")
    for part, rooms, least, what in (
        ("/dev/shm", [each.shm for each in facts], LEAST_SHM_BYTES, "NCCL, data loaders and payload rings"),
        ("/tmp", [each.tmp for each in facts], LEAST_TMP_BYTES, "the runtime folders of agents, and your own files"),
    ):
        free = min(room.free for room in rooms)
        digits = 2 if free < least else 1
        yield judged(
            part, is_well=free >= least, seen=f"{free / 2**30:.{digits}f} GiB free", by="site",
            effect=f"{what} may run out of room", todo=f"make it larger, or clear {part}",
        )  # fmt: skip


def _software(facts: Sequence[NodeFacts], plan: Plan, spec: JobSpec) -> Iterator[SiteCheck]:
    versions: dict[str, dict[str, list[str]]] = {}
    for each in facts:
        found = {"Python": each.python, "kernel": each.kernel, **each.packages}
        for what, version in found.items():
            versions.setdefault(what, {}).setdefault(version or "not installed", []).append(each.node)
    for what, by_version in versions.items():
        if len(by_version) == 1 and next(iter(by_version)) == "not installed" and what != "nvrx-slurm":
            continue
        seen = "; ".join(
            version + (f" on {', '.join(nodes[:3])}" if len(by_version) > 1 else "")
            for version, nodes in by_version.items()
        )
        yield judged(
            what, is_well=len(by_version) == 1 or what == "kernel", seen=seen, by="you",
            effect="nodes of one job run different versions",
            todo="install into one environment that all nodes share",
        )  # fmt: skip
    allowed = [each.node for each in facts if each.user_namespaces]
    yield SiteCheck(
        part="user namespaces",
        seen="allowed" if len(allowed) == len(facts) else "refused: flows with `network: own` or `disk` do without",
    )
    asked = spec.slurm.gpus_per_node
    if asked is not None and (number := asked.rpartition(":")[2]).isdecimal():
        lacking = [
            f"{each.node}: {each.gpus}" for each in facts if each.gpus is not None and each.gpus != int(number)
        ]
        yield judged(
            "GPUs", is_well=not lacking, by="site", level="fail",
            seen=", ".join(lacking) or f"{number} a node" if any(each.gpus for each in facts) else "no nvidia-smi",
            effect="a worker finds no GPU of its own", todo="see gres.conf and nvidia-smi on that node",
        )  # fmt: skip


def _limits(facts: Sequence[NodeFacts], plan: Plan, spec: JobSpec) -> Iterator[SiteCheck]:
    most_workers = max(role.workers_per_node for role in plan.roles)
    cpus = min(each.cpus for each in facts)
    yield judged(
        "CPUs", is_well=cpus > most_workers, seen=f"{cpus} for {most_workers} workers and an agent", by="you",
        effect="workers wait for each other's CPU, and for the agent's", todo="set slurm.cpus_per_task",
    )  # fmt: skip
    if memory := next((each.memory for each in facts if each.memory), ""):
        yield SiteCheck(part="cgroup", seen=memory)
    for name, least, effect, setting in (
        ("nofile", LEAST_FILES, "connections fail with `Too many open files`", "ulimit -n, or LimitNOFILE of slurmd"),
        ("memlock", None, "RDMA cannot pin memory: NCCL over InfiniBand fails", "LimitMEMLOCK=infinity of slurmd"),
    ):
        value = min((each.limits.get(name, -1) for each in facts), key=lambda found: found if found >= 0 else 1 << 62)
        seen = "unlimited" if value < 0 else str(value)
        needs_it = name != "memlock" or spec.slurm.gpus_per_node is not None
        is_low = needs_it and value >= 0 and (least is None or value < least)
        todo = f"{setting} (PropagateResourceLimitsExcept={name.upper()})"
        yield judged(f"ulimit {name}", is_well=not is_low, seen=seen, effect=effect, todo=todo, by="site")
