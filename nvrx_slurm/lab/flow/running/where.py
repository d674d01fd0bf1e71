"""Where flows run when nobody says it: the site's Slurm, else one that is started here."""

from __future__ import annotations

from nvrx_slurm.cluster.commands import SystemRunner
from nvrx_slurm.errors import MissingProgramError
from nvrx_slurm.lab.devcluster.programs import SLURM_PROGRAMS, find, require
from nvrx_slurm.lab.flow.language.model import StageName

ANSWER_S = 10.0


def choose_stage() -> StageName:
    """`slurm` if its slurmctld answers, else `dev` if its programs are installed. Raises MissingProgramError."""
    if find("sbatch") and _answers():
        return "slurm"
    try:
        require(SLURM_PROGRAMS)
    except MissingProgramError as error:
        raise MissingProgramError(f"{error}; or run the flows without Slurm: --on local") from None
    return "dev"


def _answers() -> bool:
    try:
        return SystemRunner()(("scontrol", "ping"), timeout_s=ANSWER_S).ok
    except FileNotFoundError:
        return False
