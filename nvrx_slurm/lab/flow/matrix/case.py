"""A flow of the matrix, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass, field

from nvrx_slurm.lab.flow.language.faults import FAULTS
from nvrx_slurm.lab.flow.language.model import StageName
from nvrx_slurm.lab.flow.language.phrases import nice
from nvrx_slurm.lab.flow.language.writing import Item
from nvrx_slurm.util.durations import words


@dataclass(frozen=True, slots=True)
class Case:
    """One flow of the matrix. `takes_s`: what it needs beyond the job's start, at most."""

    name: str
    about: str
    faults: tuple[Item, ...]
    expect: tuple[Item, ...]
    takes_s: float
    overrides: Item = field(default_factory=dict)  # of job.yaml, as dotted keys
    needs: Item = field(default_factory=dict)  # of the cluster, and of the stage

    def document(self, job: str, overrides: Item, start_s: float) -> Item:
        """The flow (see `writing.to_yaml`) of a job that takes `start_s` to run, at most."""
        said: Item = {"name": self.name, "about": self.about, "job": job}
        said |= {"overrides": changed} if (changed := {**overrides, **self.overrides}) else {}
        said |= self.needs
        said |= {"faults": list(self.faults)} if self.faults else {}
        return said | {"expect": list(self.expect), "limits": {"wall": words(nice(start_s + self.takes_s))}}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What the job's shape, or the stage, cannot do."""

    name: str
    why: str


def if_possible(case: Case | LeftOut, stage: StageName) -> Case | LeftOut:
    """The case, unless one of its faults cannot be done on the stage."""
    if isinstance(case, LeftOut):
        return case
    for action in (action for fault in case.faults for action in fault["do"]):
        if stage not in FAULTS[action].stages:
            able = ", ".join(FAULTS[action].stages)
            return LeftOut(case.name, f"{action} cannot be done on the stage {stage} (it can on: {able})")
    return case
