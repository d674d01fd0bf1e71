"""What a site's settings mean for a job: each line of `doctor` that is not ok, and the setting that causes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nvrx_slurm.cluster.site_checks import Site, SiteCheck, check_site, partitions_of
from nvrx_slurm.cluster.slurm_text import settings_of
from nvrx_slurm.jobspec.plan import plan
from tests.unit.jobspec.specs import job_spec

CONFIG = """\
Configuration data as of 2026-11-23T23:38:42
AccountingStorageType   = accounting_storage/slurmdbd
CliFilterPlugins        = (null)
ClusterName             = alpha
DefMemPerNode           = UNLIMITED
GresTypes               = gpu
JobRequeue              = 1
JobSubmitPlugins        = (null)
KillOnBadExit           = 0
KillWait                = 30 sec
MinJobAge               = 300 sec
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
ProctrackType           = proctrack/cgroup
RequeueExit             = (null)
SLURM_VERSION           = 24.11.5
SlurmctldHost[0]        = vm(localhost)
SlurmdTimeout           = 300 sec
SrunPortRange           = 0-0
TaskPlugin              = task/affinity,task/cgroup
TopologyPlugin          = topology/tree
UnkillableStepTimeout   = 180 sec
VSizeFactor             = 0 percent

Cgroup Support Configuration:
ConstrainRAMSpace       = yes

Slurmctld(primary) at vm is UP
"""
PARTITIONS = """\
PartitionName=main AllowGroups=ALL Default=YES DefaultTime=NONE GraceTime=120 MaxNodes=UNLIMITED MaxTime=1-00:00:00 \
OverSubscribe=NO PreemptMode=REQUEUE State=UP TotalCPUs=12 TotalNodes=8
PartitionName=debug AllowGroups=ALL Default=NO MaxNodes=2 MaxTime=UNLIMITED State=UP TotalNodes=8
"""
JOB = {"nodes": 4, "spares": 2, "slurm": {"time": "12h", "cpus_per_task": "16", "mem": "0"}}


def checks(job: dict[str, Any], old: str = "", new: str = "") -> dict[str, SiteCheck]:
    """The checks by part, for a site in which the text `old` is replaced by `new`."""
    spec = job_spec({"name": "a", "command": "x", **job})
    partitions = partitions_of(PARTITIONS.replace(old, new) if old in PARTITIONS else PARTITIONS)
    chosen = partitions.get(spec.slurm.partition or "main", {})
    config = settings_of(CONFIG.replace(old, new))
    return {each.part: each for each in check_site(Site(
        spec=spec, plan=plan(spec, folder=Path("/jobs")), config=config, partition=chosen
    ))}  # fmt: skip


def test_a_site_that_fits_gets_ok_on_each_line() -> None:
    """A line that is ok has no effect and nothing to do."""
    found = checks(JOB).values()
    assert {check.level for check in found} == {"ok"}
    assert not any(check.effect or check.todo or check.by for check in found)


@pytest.mark.parametrize(
    ("old", "new", "part", "level", "by"),
    [
        ("24.11.5", "22.05.8", "Slurm", "warn", "site"),
        ("24.11.5", "21.08.8", "Slurm", "warn", "you"),
        ("24.11.5", "27.11.0", "Slurm", "warn", "you"),
        ("KillWait                = 30", "KillWait                = 12", "KillWait", "warn", "site"),
        ("= 180 sec", "= 30 sec", "UnkillableStepTimeout", "warn", "site"),
        ("GraceTime=120", "GraceTime=10", "PreemptMode", "warn", "site"),
        ("RequeueExit             = (null)", "RequeueExit             = 1,70-80", "RequeueExit", "warn", "site"),
        ("proctrack/cgroup", "proctrack/linuxproc", "ProctrackType", "warn", "site"),
        ("= 300 sec\nSrun", "= 0 sec\nSrun", "SlurmdTimeout", "warn", "site"),
        ("= 300 sec\nSrun", "= 10 sec\nSrun", "SlurmdTimeout", "warn", "you"),
        ("accounting_storage/slurmdbd", "accounting_storage/none", "accounting", "warn", "site"),
        ("= 0-0", "= 60001-63000", "SrunPortRange", "warn", "you"),
        ("JobSubmitPlugins        = (null)", "JobSubmitPlugins        = lua", "plugins", "warn", "you"),
        ("= 0 percent", "= 110 percent", "VSizeFactor", "warn", "site"),
        ("State=UP", "State=DRAIN", "partition", "fail", "you"),
        ("TotalNodes=8", "TotalNodes=5", "nodes", "fail", "you"),
        ("MaxTime=1-00:00:00", "MaxTime=06:00:00", "time", "fail", "you"),
    ],
)
def test_a_setting_that_does_not_fit_has_its_line(old: str, new: str, part: str, level: str, by: str) -> None:
    """Only that line is not ok; it has the effect, what to change, and who changes it."""
    found = checks(JOB, old, new)
    assert [check.part for check in found.values() if check.level != "ok"] == [part]
    assert (found[part].level, found[part].by) == (level, by)
    assert found[part].effect and found[part].todo


@pytest.mark.parametrize(
    ("slurm", "part", "level"),
    [
        ({"time": None}, "time", "warn"),
        ({"cpus_per_task": None}, "TaskPlugin", "warn"),
        ({"partition": "none-such"}, "partition", "fail"),
        ({"partition": "debug"}, "nodes", "fail"),
        ({"segment": "2"}, "TopologyPlugin", "fail"),
        ({"extra": {"no-requeue": True}}, "JobRequeue", "warn"),
    ],
)
def test_a_job_that_does_not_fit_has_its_line(slurm: dict[str, Any], part: str, level: str) -> None:
    """The same for the settings of the job, which the user can change."""
    merged = {key: value for key, value in {**JOB["slurm"], **slurm}.items() if value is not None}  # type: ignore[dict-item]
    found = checks({**JOB, "slurm": merged})
    assert (found[part].level, found[part].by) == (level, "you")


def test_gpus_want_a_site_that_has_them_and_keeps_jobs_apart() -> None:
    """GresTypes must name them, and cgroup.conf must constrain devices; an exclusive node needs no constraint."""
    job = {**JOB, "slurm": {"time": "12h", "cpus_per_task": "16", "mem": "0", "gpus_per_node": "8"}}
    assert checks(job, "= gpu", "= (null)")["GresTypes"].level == "fail"
    assert checks(job)["ConstrainDevices"].level == "warn"
    assert "ConstrainDevices" not in checks(job, "ConstrainRAMSpace       = yes", "ConstrainDevices        = yes")
    assert "ConstrainDevices" not in checks(job, "OverSubscribe=NO", "Exclusive=YES")


def test_memory_that_was_not_asked_for_is_a_share() -> None:
    """This is so with a default limit and without slurm.mem; a job with a whole node gets all of its memory."""
    slurm = {"time": "12h", "cpus_per_task": "16"}
    limit = ("DefMemPerNode           = UNLIMITED", "DefMemPerNode           = 4096")
    assert checks({**JOB, "slurm": slurm}, *limit)["memory"].level == "warn"
    assert checks({**JOB, "slurm": {**slurm, "extra": {"exclusive": True}}}, *limit)["memory"].level == "ok"
    assert checks(JOB, *limit)["memory"].level == "ok"
