"""The ranks of the next iteration, from those of the last one and who is out."""

from nvrx_slurm.inprocess.exception import RankDiscarded
from nvrx_slurm.inprocess.rank_assignment.base import RankAssignment, RankAssignmentCtx, RankFilter
from nvrx_slurm.inprocess.rank_assignment.filters import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    MaxActiveWorldSize,
)
from nvrx_slurm.inprocess.rank_assignment.groups import FilterCountGroupedByKey
from nvrx_slurm.inprocess.rank_assignment.reorder import FillGaps, ShiftRanks
from nvrx_slurm.inprocess.rank_assignment.topology import Layer, LayerFlag
from nvrx_slurm.inprocess.rank_assignment.tree import Tree

__all__ = [
    "ActivateAllRanks",
    "ActiveWorldSizeDivisibleBy",
    "FillGaps",
    "FilterCountGroupedByKey",
    "Layer",
    "LayerFlag",
    "MaxActiveWorldSize",
    "RankAssignment",
    "RankAssignmentCtx",
    "RankDiscarded",
    "RankFilter",
    "ShiftRanks",
    "Tree",
]
