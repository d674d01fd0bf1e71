"""What a site's settings mean for a job, from `scontrol show config` and `scontrol show partition`. Pure.

Each check is one line of `nvrx-slurm doctor`: what was seen, and where that is not well, what happens because of it,
what to change, and who can. The settings are those of slurm.conf(5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import msgspec

from nvrx_slurm.cluster.slurm_text import RELIABLE_SINCE, fields_of, number_of, version_of
from nvrx_slurm.errors import EXIT_NO_RESTART, EXIT_RETRY
from nvrx_slurm.jobspec import budgets
from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.util.durations import parse_time_limit, words

# With which nvrx-slurm was tried.
OLDEST, NEWEST = (22, 5, 0), (26, 5, 99)

LEAST_UNKILLABLE_S = 60.0
_UNSET = ("", "(null)", "none", "N/A", "NONE")

Settings = Mapping[str, str]


class SiteCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `level`: `fail`, the job does not run, or not as it should; `warn`, it does until something happens.
    `effect`: what happens because of it; `todo`: what to change; `by`: who can, `you` or `site`. Empty: nothing."""

    part: str
    level: Literal["ok", "warn", "fail"] = "ok"
    seen: str
    effect: str = ""
    todo: str = ""
    by: Literal["", "you", "site"] = ""


def judged(
    part: str,
    *,
    is_well: bool,
    seen: str,
    effect: str,
    todo: str,
    by: Literal["you", "site"],
    level: Literal["warn", "fail"] = "warn",
) -> SiteCheck:
    """The one line of a part: what was seen, and where that is not well all the rest."""
    if is_well:
        return SiteCheck(part=part, seen=seen)
    return SiteCheck(part=part, level=level, seen=seen, effect=effect, todo=todo, by=by)


def partitions_of(stdout: str) -> dict[str, dict[str, str]]:
    """What `scontrol --oneliner show partition` prints, by name."""
    return {fields["PartitionName"]: fields for line in stdout.splitlines() if (fields := fields_of(line))}


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """The job, and what it meets. `partition`: its own, empty where Slurm shows none."""

    spec: JobSpec
    plan: Plan
    config: Settings
    partition: Settings

    def seconds(self, setting: str) -> float:
        """Of a setting such as `30 sec`; 0 where it is not shown."""
        return number_of(self.config, setting) or 0.0


def check_site(site: Site) -> list[SiteCheck]:
    """All checks, in the order in which a job meets them."""
    return [check for subject in _SUBJECTS for check in subject(site)]


def _slurm(site: Site) -> Iterator[SiteCheck]:
    version = version_of(site.config.get("SLURM_VERSION", ""))
    seen = f"{site.config.get('SLURM_VERSION', 'unknown')}, cluster {site.config.get('ClusterName', 'unknown')}"
    if version is None or RELIABLE_SINCE <= version <= NEWEST:
        yield SiteCheck(part="Slurm", seen=seen)
    elif version < OLDEST or version > NEWEST:
        yield SiteCheck(
            part="Slurm", level="warn", seen=seen, by="you",
            effect="nvrx-slurm was tried with Slurm 22.05 to 26.05 only",
            todo="try your job with its faults: nvrx-slurm ci matrix job.yaml --on slurm",
        )  # fmt: skip
    else:
        yield SiteCheck(
            part="Slurm", level="warn", seen=seen, by="site",
            effect="before 23.02.3, agents that are started again after a node loss are not reliable",
            todo="upgrade Slurm",
        )  # fmt: skip


def _partition(site: Site) -> Iterator[SiteCheck]:
    partition, slurm, plan = site.partition, site.spec.slurm, site.plan
    name = partition.get("PartitionName")
    if name is None:
        yield SiteCheck(
            part="partition", level="fail", by="you",
            seen=f"no partition {slurm.partition} is shown" if slurm.partition else "Slurm has no default partition",
            effect="Slurm refuses the job", todo="set slurm.partition to one that `sinfo -s` lists",
        )  # fmt: skip
        return
    state = partition.get("State", "UP")
    yield judged(
        "partition", is_well=state == "UP", seen=f"{name} is {state}", by="you", level="fail",
        effect="the job stays pending, or is refused", todo="choose another: slurm.partition",
    )  # fmt: skip
    for setting in ("MaxNodes", "TotalNodes"):
        most = partition.get(setting, "UNLIMITED")
        if most.isdecimal() and plan.least_nodes > int(most):
            yield SiteCheck(
                part="nodes", level="fail", by="you",
                seen=f"{plan.least_nodes}, of which {plan.active_nodes} work, {setting}={most}",
                effect="the job stays pending with PartitionNodeLimit, or is refused", todo="ask for fewer nodes",
            )  # fmt: skip
            break
    else:
        yield SiteCheck(part="nodes", seen=f"{plan.total_nodes} of {partition.get('TotalNodes', '?')}")
    yield from _time(site)


def _time(site: Site) -> Iterator[SiteCheck]:
    asked_s, most, default = site.spec.slurm.time, site.partition.get("MaxTime"), site.partition.get("DefaultTime")
    most_s = parse_time_limit(most) if most and most not in _UNSET else None
    if asked_s is not None and most_s is not None and asked_s > most_s:
        yield SiteCheck(
            part="time", level="fail", seen=f"slurm.time is {words(asked_s)}, MaxTime={most}", by="you",
            effect="the job stays pending with PartitionTimeLimit, or is refused",
            todo=f"set slurm.time to {words(most_s)} at most",
        )  # fmt: skip
    elif asked_s is None:
        limit = default if default not in _UNSET and default is not None else most
        is_none = limit is None or limit in ("UNLIMITED", *_UNSET)
        yield SiteCheck(
            part="time", level="warn", by="you",
            seen="slurm.time is not set, " + ("and there is no limit" if is_none else f"Slurm takes {limit}"),
            effect="backfill cannot place the job early, and workers get no checkpoint signal"
            if is_none
            else f"the job ends after {limit}",
            todo="set slurm.time",
        )  # fmt: skip
    else:
        yield SiteCheck(part="time", seen=f"{words(asked_s)}, MaxTime={most}")


def _ends(site: Site) -> Iterator[SiteCheck]:
    teardown, kill_wait_s = site.plan.fault_tolerance.teardown, site.seconds("KillWait")
    left_s = budgets.grace_within(kill_wait_s)
    yield judged(
        "KillWait", is_well=teardown.grace <= left_s, by="site",
        seen=f"{kill_wait_s:g} s; teardown.grace is {words(teardown.grace)}",
        effect=f"when the job is cancelled or preempted, workers get {words(left_s)} from the signal to SIGKILL",
        todo=f"set KillWait={teardown.grace + budgets.AFTER_GRACE_S:g}, or a shorter teardown.grace yourself",
    )  # fmt: skip
    seen = site.config.get("KillOnBadExit", "0")
    yield SiteCheck(part="KillOnBadExit", seen=f"{seen}; the srun of the agents says 0 itself")
    unkillable_s = site.seconds("UnkillableStepTimeout")
    yield judged(
        "UnkillableStepTimeout", is_well=unkillable_s >= LEAST_UNKILLABLE_S, seen=f"{unkillable_s:g} s", by="site",
        effect="Slurm drains a node whose processes take longer to die, which a GPU driver or a dead file system"
        " brings about; the job then has a node less",
        todo="set UnkillableStepTimeout=180",
    )  # fmt: skip
    yield from _requeue(site)
    tracking = site.config.get("ProctrackType", "")
    yield judged(
        "ProctrackType", is_well=tracking == "proctrack/cgroup", seen=tracking, by="site",
        effect="a process that detaches itself in a `setup` line outlives the job; those of workers do not, their"
        " agents kill them",
        todo="set ProctrackType=proctrack/cgroup",
    )  # fmt: skip


def _requeue(site: Site) -> Iterator[SiteCheck]:
    config, partition, extra = site.config, site.partition, site.spec.slurm.extra
    default = config.get("JobRequeue", "1")
    if extra.get("no-requeue"):
        yield SiteCheck(
            part="JobRequeue", level="warn", seen="slurm.extra says no-requeue", by="you",
            effect="a preemption, and the loss of the batch host, end the job", todo="remove it from slurm.extra",
        )  # fmt: skip
    else:
        yield SiteCheck(part="JobRequeue", seen=f"{default}; the job says --requeue itself")
    mode = partition.get("PreemptMode", config.get("PreemptMode", "OFF"))
    grace_s = float(partition.get("GraceTime", "0")) if partition.get("GraceTime", "0").isdecimal() else 0.0
    needed_s = budgets.least_notice_s(site.plan.fault_tolerance.teardown.grace, 0.0)
    seen = f"{mode}, GraceTime={grace_s:g}"
    if config.get("PreemptType", "") in ("preempt/none", *_UNSET) or "OFF" in mode:
        yield SiteCheck(part="PreemptMode", seen=f"{mode}: no job is preempted")
    elif 0 < grace_s < needed_s:
        yield SiteCheck(
            part="PreemptMode", level="warn", seen=seen, by="site",
            effect=f"a preempted job has {grace_s:g} s, and its teardown takes {needed_s:g} s",
            todo=f"set GraceTime={needed_s:g} for the partition or its QOS, or a shorter teardown.grace yourself",
        )  # fmt: skip
    elif "CANCEL" in mode and extra.get("no-requeue"):
        yield SiteCheck(
            part="PreemptMode", level="warn", seen=seen, by="you",
            effect="a preempted job ends for good", todo="remove no-requeue from slurm.extra",
        )  # fmt: skip
    else:
        yield SiteCheck(part="PreemptMode", seen=f"{seen}: a preempted job goes on later, from its checkpoint")
    for setting in ("RequeueExit", "RequeueExitHold"):
        codes = config.get(setting, "")
        for code in (EXIT_RETRY, EXIT_NO_RESTART):
            if _names(codes, code):
                yield SiteCheck(
                    part=setting, level="warn", seen=codes, by="site",
                    effect=f"Slurm requeues a job that ends with {code}, which stands for"
                    + (" a loss that is worth a retry" if code == EXIT_RETRY else " `do not restart`"),
                    todo=f"take {code} out of {setting}",
                )  # fmt: skip


def _names(codes: str, code: int) -> bool:
    """Whether a list such as `1,70-80` has the code."""
    for part in codes.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and int(first) <= code <= int(last if last.isdecimal() else first):
            return True
    return False


def _resources(site: Site) -> Iterator[SiteCheck]:
    config, partition, slurm = site.config, site.partition, site.spec.slurm
    most_workers = max(role.workers_per_node for role in site.plan.roles)
    is_whole = (
        slurm.extra.get("exclusive", False) is not False
        or "EXCLUSIVE" in partition.get("OverSubscribe", "")
        or partition.get("Exclusive", "NO") != "NO"  # as Slurm 26.05 says it
    )
    binds = [plugin for plugin in ("affinity", "cgroup") if plugin in config.get("TaskPlugin", "")]
    if binds and slurm.cpus_per_task is None and "cpus-per-gpu" not in slurm.extra and not is_whole:
        yield SiteCheck(
            part="TaskPlugin", level="warn", seen=f"{config['TaskPlugin']}, slurm.cpus_per_task is not set", by="you",
            effect=f"the agent of a node and its {most_workers} workers share one CPU",
            todo="set slurm.cpus_per_task to the CPUs of all workers of a node together",
        )  # fmt: skip
    else:
        yield SiteCheck(part="TaskPlugin", seen=config.get("TaskPlugin", ""))
    limit = next(
        (f"{name}={found}"
         for name in ("DefMemPerCPU", "DefMemPerNode")
         for found in (partition.get(name, ""), config.get(name, ""))
         if found.isdecimal() and int(found)),
        None,
    )  # fmt: skip
    enforced = config.get("ConstrainRAMSpace", "no") == "yes"
    has_memory = slurm.mem is not None or is_whole or bool({"mem-per-cpu", "mem-per-gpu"} & set(slurm.extra))
    if limit and not has_memory:
        yield SiteCheck(
            part="memory", level="warn", by="you",
            seen=f"{limit} (MB), slurm.mem is not set" + ("; ConstrainRAMSpace=yes" if enforced else ""),
            effect="the workers of a node share no more than that"
            + (", and the kernel kills one that needs more" if enforced else ""),
            todo="set slurm.mem; 0 is all of a node's memory",
        )  # fmt: skip
    else:
        yield SiteCheck(part="memory", seen=f"slurm.mem: {slurm.mem or 'not set'}; {limit or 'no default limit'}")
    if site.seconds("VSizeFactor"):
        yield SiteCheck(
            part="VSizeFactor", level="warn", seen=config["VSizeFactor"], by="site",
            effect="virtual memory is limited: CUDA and shared memory reserve far more than they use, and fail",
            todo="set VSizeFactor=0",
        )  # fmt: skip
    if slurm.gpus_per_node is not None:
        has_gpus = "gpu" in config.get("GresTypes", "")
        yield judged(
            "GresTypes", is_well=has_gpus, seen=config.get("GresTypes", "(null)"), by="you", level="fail",
            effect="Slurm refuses slurm.gpus_per_node", todo="leave slurm.gpus_per_node out",
        )  # fmt: skip
        if has_gpus and config.get("ConstrainDevices", "no") != "yes" and not is_whole:
            yield SiteCheck(
                part="ConstrainDevices", level="warn", seen=config.get("ConstrainDevices", "no"), by="site",
                effect="workers can reach the GPUs of other jobs on the node, and others theirs",
                todo="set ConstrainDevices=yes in cgroup.conf",
            )  # fmt: skip
    if slurm.segment is not None and "block" not in config.get("TopologyPlugin", ""):
        yield SiteCheck(
            part="TopologyPlugin", level="fail", seen=config.get("TopologyPlugin", ""), by="you",
            effect="slurm.segment needs topology/block", todo="leave slurm.segment out",
        )  # fmt: skip


def _watching(site: Site) -> Iterator[SiteCheck]:
    config, timeout_s = site.config, site.seconds("SlurmdTimeout")
    bounds = site.plan.fault_tolerance
    silence = words(bounds.heartbeat.timeout)
    if timeout_s and timeout_s <= bounds.fence_timeout:
        yield SiteCheck(
            part="SlurmdTimeout", level="warn", seen=f"{timeout_s:g} s", by="you",
            effect="after the loss of the batch host Slurm may start the job again while a node that is cut off still"
            f" runs its ranks: they live for up to {words(bounds.fence_timeout)}",
            todo=f"set fault_tolerance.fence_timeout below {timeout_s:g}s",
        )  # fmt: skip
    elif timeout_s:
        yield SiteCheck(
            part="SlurmdTimeout",
            seen=f"{timeout_s:g} s; the job itself notices a lost node within {silence}: only the loss of the batch"
            " host waits for Slurm",
        )
    else:
        yield SiteCheck(
            part="SlurmdTimeout", level="warn", seen="0", by="site",
            effect="Slurm never marks a dead node down: after the loss of the batch host the job waits for its limit",
            todo="set SlurmdTimeout=300",
        )  # fmt: skip
    accounting = config.get("AccountingStorageType", "")
    accounting = "accounting_storage/none" if accounting in _UNSET else accounting
    yield judged(
        "accounting", is_well=accounting != "accounting_storage/none", seen=accounting, by="site",
        effect=f"Slurm forgets a job {words(site.seconds('MinJobAge'))} after its end: where it left no result of"
        " its own, `wait` cannot say how it ended",
        todo="run slurmdbd",
    )  # fmt: skip
    ports = config.get("SrunPortRange", "0-0")
    if ports not in ("0-0", *_UNSET):
        yield SiteCheck(
            part="SrunPortRange", level="warn", seen=ports, by="you",
            effect="a firewall between the nodes is likely; the job's own servers take any free port",
            todo="see whether nodes reach each other: nvrx-slurm doctor --probe",
        )  # fmt: skip
    plugins = [
        config[name] for name in ("JobSubmitPlugins", "CliFilterPlugins") if config.get(name, "") not in _UNSET
    ]
    if plugins:
        yield SiteCheck(
            part="plugins", level="warn", seen=", ".join(plugins), by="you",
            effect="they may change or refuse what the job asks for",
            todo="compare: nvrx-slurm render job.yaml, and scontrol show job ID once it is submitted",
        )  # fmt: skip


_SUBJECTS: tuple[Callable[[Site], Iterator[SiteCheck]], ...] = (_slurm, _partition, _ends, _resources, _watching)
