"""Mutants of what surrounds a job: the flows that test it."""

from __future__ import annotations

from ci.mutants.model import Edit, Mutant

FLOW = ("tests/unit/lab/flow/test_flow_run.py", "tests/unit/lab/flow/test_attempt.py")

SURROUNDINGS = (
    Mutant(
        "fault-that-never-came-passes",
        "a flow fails if a fault of it did not happen",
        (
            Edit(
                "nvrx_slurm/lab/flow/attempt.py",
                "        found += of_faults(flow, run.scheduler)\n",
                "        found += []\n",
            ),
        ),
        FLOW,
    ),
    Mutant(
        "fault-without-proof-passes",
        "a fault that cannot be proven did not happen",
        (
            Edit(
                "nvrx_slurm/lab/flow/flow_run.py",
                "            self.findings.append(finding)\n            return\n",
                "            self.scheduler.fault_happened(fault, self._now(), {})\n            return\n",
            ),
        ),
        FLOW,
    ),
)
