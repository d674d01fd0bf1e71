"""Mutants of what runs on a node: the agent's ports, the supervisor, the teardown."""

from __future__ import annotations

from ci.mutants.model import Edit, Mutant

NODE = (
    Mutant(
        "teardown-without-kill",
        "a worker that ignores SIGTERM is killed after the grace",
        (
            Edit(
                "nvrx_slurm/agent/teardown.py", 'while ORDER[at] != "kill" and', 'while ORDER[at] != "terminate" and'
            ),
        ),
        ("tests/unit/agent/test_teardown.py",),
        flows=("deaf-worker",),
    ),
)
