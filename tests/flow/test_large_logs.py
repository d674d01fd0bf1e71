"""A job with large logs: the agents read the logs, and the broker decides by what they have found."""

from __future__ import annotations

import os
import sys

from nvrx_slurm.errors import EXIT_NO_RESTART
from nvrx_slurm.jobspec.model import AttributionSpec
from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import Attributed, AttributionJudged
from nvrx_slurm.journal.verdicts import SHARED_FROM_BYTES, Verdict
from tests.harness import plan_of

NODES = 2
PRINTS = f"""\
import os, signal, sys
line = "step 1000 loss 2.250 grad_norm 0.81 tokens per second per device 10482.5\\n" * 1000
with os.fdopen(os.dup(1), "w") as out:
    for _ in range({SHARED_FROM_BYTES // NODES} // len(line) + 20):
        out.write(line)
if os.environ["RANK"] == "0":
    open(sys.argv[1], "w").close()
    signal.pause()
open(sys.argv[1]).close()
{{}}["lr"]
"""
"""Rank 1 fails only once rank 0, too, has printed: each blocks until the other has opened the FIFO."""


def test_agents_read_the_logs_of_a_large_job(run_local, tmp_path):
    """The verdict names the fault in rank 1's log, and is made from the findings of both agents."""
    os.mkfifo(tmp_path / "printed")
    role = RolePlan(
        name="main", nodes_per_replica=NODES, command=(sys.executable, "-c", PRINTS, str(tmp_path / "printed"))
    )
    attribution = AttributionSpec(enable_lib=True, dry_run=False, timeout=600.0, decision_timeout=600.0)
    job = run_local(plan_of(tmp_path, role, attribution=attribution))
    assert job.finish() == EXIT_NO_RESTART
    (answer,) = [each.attribution for each in job.said(Attributed)]
    assert (answer.verdict, answer.fault, answer.ranks) == (Verdict.STOP, "key_error", (1,))
    assert answer.read is not None
    assert answer.read.agents == NODES
    assert answer.read.size_bytes >= SHARED_FROM_BYTES
    assert [judged.acted for judged in job.said(AttributionJudged)] == [True]
