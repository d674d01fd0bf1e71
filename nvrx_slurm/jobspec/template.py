"""Where the template of the job script lies."""

from __future__ import annotations

from pathlib import Path

import nvrx_slurm

TEMPLATE = "job.sh.template"


def template_folder() -> Path:
    """`sbatch/` inside the installed package, or beside it in a source checkout."""
    package = Path(nvrx_slurm.__file__).parent
    installed = package / "sbatch"
    return installed if installed.is_dir() else package.parent / "sbatch"
