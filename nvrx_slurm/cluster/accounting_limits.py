"""What a site's accounting allows a job: the limits of its QOS, of its partition's QOS and of its association. Pure.

From `sacctmgr show qos` and `sacctmgr show assoc` (sacctmgr(1)); https://slurm.schedmd.com/resource_limits.html says
which limit counts where. An association shows the Max… limits that it inherits from the accounts above it, and not
their Grp… limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

from nvrx_slurm.cluster.site_checks import Settings, SiteCheck
from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.util.durations import parse_time_limit, words

QOS_FORMAT = "format=Name,Flags,GraceTime,PreemptMode,MaxWall,MaxTRES,MaxTRESPU,GrpTRES"
ASSOC_FORMAT = "format=Account,Partition,QOS,DefaultQOS,MaxWall,MaxTRES,GrpTRES"
USER_FORMAT = "format=User,DefaultAccount"

_ENFORCING = {"limits", "safe", "all"}
_PER = {"MaxTRES": "for a job", "MaxTRESPU": "for a user", "GrpTRES": "for all jobs together"}


def rows_of(stdout: str) -> list[dict[str, str]]:
    """What `sacctmgr --parsable2` prints: a line of names, then a line for each row."""
    names, *rows = [line.split("|") for line in stdout.splitlines() if "|" in line] or [[]]
    return [dict(zip(names, row, strict=False)) for row in rows]


class Accounting(msgspec.Struct, frozen=True, kw_only=True):
    """What sacctmgr shows: each QOS, and this user's associations on this cluster. `account`: the user's default."""

    qos: Mapping[str, Settings]
    associations: tuple[Settings, ...]
    account: str = ""

    def association(self, spec: JobSpec, partition: str) -> Settings | None:
        """The one that the job runs under: one for its partition comes first."""
        account = spec.slurm.account or self.account
        own = [each for each in self.associations if each.get("Account") == account]
        # An association without a partition holds for all of them.
        fitting = [each for each in own if each.get("Partition") in (partition, "")]
        return max(fitting, key=lambda each: bool(each.get("Partition")), default=None)

    def qos_of(self, spec: JobSpec, partition: str) -> str:
        """The job's QOS: its own, or its association's default, or Slurm's."""
        association = self.association(spec, partition) or {}
        return spec.slurm.qos or association.get("Def QOS") or "normal"


def is_enforced(config: Settings) -> bool:
    """Whether Slurm heeds limits at all."""
    return bool(_enforced(config) & (_ENFORCING | {"associations", "qos"}))


def preemption_of(accounting: Accounting, spec: JobSpec, config: Settings, partition: Settings) -> dict[str, str]:
    """PreemptMode and GraceTime where the QOS decides them, in the form that a partition has."""
    qos = accounting.qos.get(accounting.qos_of(spec, partition.get("PartitionName", "")))
    if qos is None or config.get("PreemptType") != "preempt/qos":
        return {}
    mode = qos.get("PreemptMode", "cluster")
    # `cluster`: the QOS leaves it to slurm.conf.
    said = {} if mode in ("cluster", "") else {"PreemptMode": mode.upper()}
    return {**said, "GraceTime": f"{parse_time_limit(qos.get('GraceTime') or '0'):.0f}"}


def check_limits(
    accounting: Accounting | None, spec: JobSpec, plan: Plan, config: Settings, partition: Settings
) -> Iterator[SiteCheck]:
    """A line for each limit that the job does not keep to; one that says so where it keeps to all.

    `accounting`: None where sacctmgr has no answer about the user."""
    if not is_enforced(config):
        return
    if accounting is None:
        yield SiteCheck(
            part="QOS", level="warn", seen="sacctmgr has no answer about you", by="you",
            effect="whether the job keeps to the limits of its QOS and account is not known",
            todo="ask on a login node: sacctmgr show qos; sacctmgr show assoc user=$USER",
        )  # fmt: skip
        return
    where = partition.get("PartitionName", "")
    association, name = accounting.association(spec, where), accounting.qos_of(spec, where)
    allowed = [each for each in (association or {}).get("QOS", "").split(",") if each]
    if association is None:
        account = spec.slurm.account or accounting.account or "no account"
        known = sorted({each.get("Account", "") for each in accounting.associations})
        yield SiteCheck(
            part="account", level="fail", seen=f"you have no association with {account}", by="you",
            effect="Slurm refuses the job",
            todo=f"set slurm.account to one of {', '.join(known)}" if known else "ask the site for an account",
        )  # fmt: skip
    if name not in accounting.qos or (allowed and name not in allowed):
        choice = ", ".join(allowed or accounting.qos)
        yield SiteCheck(
            part="QOS", level="fail", seen=f"{name} is none of yours: {choice}", by="you",
            effect="Slurm refuses the job", todo="set slurm.qos to one of these",
        )  # fmt: skip
        return
    sources = {f"QOS {name}": accounting.qos[name]}
    if (of_partition := partition.get("QoS", "N/A")) in accounting.qos:
        sources[f"QOS {of_partition} of {where}"] = accounting.qos[of_partition]
    if association is not None:
        sources[f"account {association.get('Account')}"] = association
    if not _enforced(config) & _ENFORCING:
        yield SiteCheck(part="QOS", seen=f"{name}; Slurm enforces no limits")
        return
    found = [check for source, limits in sources.items() for check in _broken(source, limits, spec, plan)]
    yield from found
    if not found:
        set_limits = [
            f"{key}={limits[key]}" for limits in sources.values() for key in ("MaxWall", *_PER) if limits.get(key)
        ]
        yield SiteCheck(part="QOS", seen=f"{name}: {', '.join(dict.fromkeys(set_limits)) or 'no limit'}")


def _broken(source: str, limits: Settings, spec: JobSpec, plan: Plan) -> Iterator[SiteCheck]:
    denies = "DenyOnLimit" in limits.get("Flags", "")
    reason = "QOS" if source.startswith("QOS") else "Assoc"
    effect = "Slurm refuses the job" if denies else f"the job stays pending, with a reason like {reason}Max…Limit"
    most = limits.get("MaxWall", "")
    if most and spec.slurm.time is not None and spec.slurm.time > parse_time_limit(most):
        yield SiteCheck(
            part="time", level="fail", by="you", effect=effect,
            seen=f"slurm.time is {words(spec.slurm.time)}, MaxWall={most} of {source}",
            todo=f"set slurm.time to {words(parse_time_limit(most))} at most, or choose another slurm.qos",
        )  # fmt: skip
    for key, per in _PER.items():
        for tres, wanted in _wanted(spec, plan).items():
            limit = re.search(rf"(?:^|,){tres}=(\d+)", limits.get(key, ""))
            if limit is not None and wanted > int(limit[1]):
                yield SiteCheck(
                    part="QOS" if reason == "QOS" else "account", level="fail", by="you", effect=effect,
                    seen=f"the job asks for {tres}={wanted}, and {source} allows {limit[1]} {per} ({key})",
                    todo="ask for less, or choose another slurm.qos or slurm.account",
                )  # fmt: skip


def _wanted(spec: JobSpec, plan: Plan) -> dict[str, int]:
    """What the job counts for, at least, as Slurm names it."""
    nodes = plan.least_nodes
    wanted = {"node": nodes}
    if spec.slurm.gpus_per_node is not None:  # `8`, `h100:8`, `h100`, or a list of those
        counts = (part.rpartition(":")[2] for part in str(spec.slurm.gpus_per_node).split(","))
        wanted["gres/gpu"] = sum(int(count) if count.isdecimal() else 1 for count in counts) * nodes
    if spec.slurm.cpus_per_task is not None:
        wanted["cpu"] = int(spec.slurm.cpus_per_task) * nodes
    return wanted


def _enforced(config: Settings) -> set[str]:
    return set(config.get("AccountingStorageEnforce", "").split(","))
