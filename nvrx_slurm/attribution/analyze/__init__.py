"""From hits and facts to one attribution: pure."""

from nvrx_slurm.attribution.analyze.asking import inquiry_for
from nvrx_slurm.attribution.analyze.attributing import attribute
from nvrx_slurm.attribution.analyze.gathered import Gathered

__all__ = ["Gathered", "attribute", "inquiry_for"]
