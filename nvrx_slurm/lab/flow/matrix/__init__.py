"""The fault matrix of one job: which faults its shape and a stage allow, and what must follow from each. Pure.

What must follow is read from the job's own plan: its spares, `min_nodes`, restart budget, roles and bounds.
Nothing is asked of the workload: a fault happens once every replica runs, and the flow is over once the job has
recovered, or has ended as it should.
"""

from __future__ import annotations

from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.lab.flow.language.model import StageName
from nvrx_slurm.lab.flow.matrix.cases import OF_A_ROLE, OF_THE_JOB, starts
from nvrx_slurm.lab.flow.matrix.shape import LeftOut, MatrixCase, RoleShape, if_possible

__all__ = ["LeftOut", "MatrixCase", "matrix"]


def matrix(plan: Plan, stage: StageName) -> list[MatrixCase | LeftOut]:
    """Every fault that there is for this job, those of one role after the other, then those of the job."""
    shapes = [RoleShape(plan, role, stage) for role in plan.roles]
    found: list[MatrixCase | LeftOut] = [starts(shapes[0])]
    found += [make(shape) for shape in shapes for make in OF_A_ROLE]
    found += [make(shapes[0]) for make in OF_THE_JOB]
    return [if_possible(case, stage) for case in found]
