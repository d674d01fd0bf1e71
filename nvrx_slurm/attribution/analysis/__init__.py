"""From hits and facts to one attribution: pure."""

from nvrx_slurm.attribution.analysis.asking import inquiry_for
from nvrx_slurm.attribution.analysis.attributing import attribute
from nvrx_slurm.attribution.analysis.gathered import Gathered

__all__ = ["Gathered", "attribute", "inquiry_for"]
