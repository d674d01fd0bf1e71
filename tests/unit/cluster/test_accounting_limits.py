"""What a site's accounting allows a job: `doctor` has a line for each limit that the job exceeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nvrx_slurm.cluster.accounting_limits import Accounting, check_limits, preemption_of, rows_of
from nvrx_slurm.cluster.site_checks import SiteCheck
from nvrx_slurm.jobspec.plan import plan
from tests.unit.jobspec.specs import job_spec

QOS = """\
Name|Flags|GraceTime|PreemptMode|MaxWall|MaxTRES|MaxTRESPU|GrpTRES
normal||00:00:00|cluster||||
long||00:02:00|requeue|2-00:00:00|node=8,gres/gpu=64|cpu=512|node=100
short|DenyOnLimit|00:00:00|cluster|00:30:00|node=1||
"""
ASSOCIATIONS = """\
Account|Partition|QOS|Def QOS|MaxWall|MaxTRES|GrpTRES
vision||long,normal|long|||
vision|debug|short|short||node=2|
speech||normal||1-00:00:00|||
"""
CONFIG = {"AccountingStorageEnforce": "associations,limits,qos", "PreemptType": "preempt/qos"}
ACCOUNTING = Accounting(
    qos={row["Name"]: row for row in rows_of(QOS)}, associations=tuple(rows_of(ASSOCIATIONS)), account="vision"
)
PARTITION = {"PartitionName": "main", "QoS": "N/A"}


def checks(
    job: dict[str, Any], config: dict[str, str] = CONFIG, partition: str = "main", **more: str
) -> list[SiteCheck]:
    spec = job_spec({"name": "a", "command": "x", **job})
    where = {**PARTITION, "PartitionName": partition, **more}
    return list(check_limits(ACCOUNTING, spec, plan(spec, folder=Path("/jobs")), config, where))


@pytest.mark.parametrize(
    ("job", "more", "part", "words"),
    [
        ({"nodes": 7, "spares": 2}, {}, "QOS", "node=9, and QOS long allows 8 for a job"),
        ({"nodes": 8, "slurm": {"gpus_per_node": "h100:9"}}, {}, "QOS", "gres/gpu=72, and QOS long allows 64"),
        ({"nodes": 8, "slurm": {"cpus_per_task": 65}}, {}, "QOS", "cpu=520, and QOS long allows 512 for a user"),
        ({"slurm": {"time": "3d"}}, {}, "time", "3d, MaxWall=2-00:00:00 of QOS long"),
        ({"slurm": {"time": "25h", "account": "speech"}}, {}, "time", "MaxWall=1-00:00:00 of account speech"),
        ({"slurm": {"qos": "short"}}, {}, "QOS", "short is none of yours: long, normal"),
        ({"slurm": {"qos": "fast"}}, {}, "QOS", "fast is none of yours"),
        ({"slurm": {"account": "nobody"}}, {}, "account", "no association with nobody"),
        ({"nodes": 2}, {"QoS": "short"}, "QOS", "QOS short of main allows 1"),
        ({"nodes": 3, "slurm": {"qos": "short"}}, {"partition": "debug"}, "account", "account vision allows 2"),
    ],
)  # fmt: skip
def test_what_the_job_does_not_keep_to_is_a_line(job, more, part, words) -> None:
    """The line has the limit, whose it is, and the consequence."""
    failed = [each for each in checks(job, **more) if each.level == "fail"]
    assert any(each.part == part and words in each.seen for each in failed), failed
    assert all(each.effect and each.todo and each.by == "you" for each in failed)


def test_what_slurm_does_at_a_limit_depends_on_the_qos() -> None:
    """With DenyOnLimit Slurm refuses the job; otherwise the job waits for ever."""
    (denied,) = checks({"nodes": 2, "slurm": {"qos": "short"}}, partition="debug")
    (waits,) = checks({"nodes": 9})
    assert denied.effect == "Slurm refuses the job"
    assert "stays pending" in waits.effect


def test_a_job_that_keeps_to_all_gets_one_line() -> None:
    """The line has the limits; a range of spares counts by its minimum."""
    job = {"nodes": 8, "spares": "0..2", "slurm": {"time": "1d"}}
    assert [(each.level, each.seen) for each in checks(job)] == [
        ("ok", "long: MaxWall=2-00:00:00, MaxTRES=node=8,gres/gpu=64, MaxTRESPU=cpu=512, GrpTRES=node=100")
    ]
    assert [each.seen for each in checks(job, {"AccountingStorageEnforce": "associations"})] == [
        "long; Slurm enforces no limits"
    ]
    assert checks({"nodes": 99}, {"AccountingStorageEnforce": "none"}) == []


def test_accounting_that_does_not_answer_is_said() -> None:
    """This is a warning only: the job may still fit."""
    spec = job_spec({"name": "a", "command": "x"})
    (line,) = check_limits(None, spec, plan(spec, folder=Path("/jobs")), CONFIG, PARTITION)
    assert (line.level, line.part) == ("warn", "QOS")


def test_a_preemption_has_the_grace_of_the_qos() -> None:
    """This is so where the QOS decides about preemption; a QOS that leaves the mode to the cluster sets none."""
    spec, other = (job_spec({"name": "a", "command": "x", "slurm": {"qos": qos}}) for qos in ("long", "normal"))
    assert preemption_of(ACCOUNTING, spec, CONFIG, PARTITION) == {"PreemptMode": "REQUEUE", "GraceTime": "120"}
    assert preemption_of(ACCOUNTING, other, CONFIG, PARTITION) == {"GraceTime": "0"}
    assert preemption_of(ACCOUNTING, spec, {"PreemptType": "preempt/none"}, PARTITION) == {}
