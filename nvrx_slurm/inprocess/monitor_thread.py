"""Where code that was written for `nvidia_resiliency_ext.inprocess` looks for RankShouldRestart."""

from nvrx_slurm.inprocess.exception import RankShouldRestart

__all__ = ["RankShouldRestart"]
