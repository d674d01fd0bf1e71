"""Slurm's programs: where they are, what to install when one is missing, and what they are asked (sinfo, …)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from nvrx_slurm.cluster.slurm_text import version_of
from nvrx_slurm.errors import MissingProgramError, NvrxError, SlurmUnreachable

SLURM_PROGRAMS = ("slurmctld", "slurmd", "munged", "sinfo", "squeue", "scontrol", "scancel")
ACCOUNTING_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")

# daemons live where an ordinary user's PATH does not reach
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin:/opt/slurm/sbin:/opt/slurm/bin"
_OLDER_NAMES = {"mariadbd": "mysqld", "mariadb-install-db": "mysql_install_db"}
_PACKAGES = {
    "apt-get": {
        "slurm": "slurm-wlm",
        "munged": "munge",
        "slurmdbd": "slurmdbd",
        "maria": "mariadb-server",
    },
    "dnf": {
        "slurm": "slurm slurm-slurmctld slurm-slurmd",
        "munged": "munge",
        "slurmdbd": "slurm-slurmdbd",
        "maria": "mariadb-server",
    },
}


def find(program: str) -> str | None:
    """The program's full path, looked up on PATH and then where daemons are installed."""
    for name in (program, _OLDER_NAMES.get(program)):
        if name and (path := shutil.which(name) or shutil.which(name, path=_SBIN)):
            return path
    return None


def require(programs: Iterable[str]) -> dict[str, str]:
    """Program → full path. Raises MissingProgramError with the one line that installs all that lack."""
    found = {program: find(program) for program in programs}
    missing = [program for program, path in found.items() if path is None]
    if missing:
        packager = "dnf" if shutil.which("dnf") and not shutil.which("apt-get") else "apt-get"
        raise MissingProgramError(missing_message(missing, packager))
    return {program: path for program, path in found.items() if path}


def missing_message(missing: list[str], packager: str) -> str:
    """Which command installs `missing`, on a machine with this packager (`apt-get` or `dnf`)."""
    names = _PACKAGES[packager]
    others = ["maria" if program.startswith("maria") else "slurm" for program in missing]
    families = [program if program in names else other for program, other in zip(missing, others, strict=True)]
    packages = " ".join(dict.fromkeys(names[family] for family in families))
    hint = " (on RHEL-like systems from EPEL: sudo dnf install -y epel-release)" if packager == "dnf" else ""
    return f"not installed: {', '.join(missing)}; install with: sudo {packager} install -y {packages}{hint}"


def slurm_version(slurmctld: str) -> tuple[int, int]:
    """(22, 5) of `slurm-wlm 22.05.8`. Raises NvrxError when the program does not say."""
    said = subprocess.run([slurmctld, "-V"], capture_output=True, text=True, timeout=10, check=False).stdout
    if (version := version_of(said)) is None:
        raise NvrxError(
            f"`{Path(slurmctld).name} -V` printed {said.strip()!r}, which names no version such as 22.05.8"
        )
    return version[:2]


_COMMAND_TIMEOUT_S = 20


def ask(environment: Mapping[str, str], *command: str) -> str:
    """What one of Slurm's commands prints. Raises MissingProgramError, SlurmUnreachable with its complaint."""
    program = require(command[:1])[command[0]]
    try:
        result = subprocess.run(
            [program, *command[1:]],
            # Nothing of this process's environment: SQUEUE_PARTITION, for one, would change the answer.
            env={"PATH": os.defpath, **environment},
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SlurmUnreachable(f"`{' '.join(command)}` gave no answer in {_COMMAND_TIMEOUT_S} s") from None
    if result.returncode:
        raise SlurmUnreachable(f"`{' '.join(command)}` failed: {result.stderr.strip()}")
    return result.stdout


def node_states(environment: Mapping[str, str]) -> dict[str, str]:
    """Node → Slurm's state, such as `idle`, `down*` (the star: it does not answer) or `mixed`."""
    return parse_node_states(ask(environment, "sinfo", "--noheader", "--Node", "--format=%N %T"))


def parse_node_states(text: str) -> dict[str, str]:
    """The value of `sinfo -h -N -o '%N %T'`."""
    return dict(line.split(maxsplit=1) for line in text.splitlines() if line.strip())


def unfinished_jobs(environment: Mapping[str, str]) -> list[str]:
    """Ids of the jobs that wait, run or complete."""
    return ask(environment, "squeue", "--noheader", "--format=%A").split()


def cancel_all(environment: Mapping[str, str], user: str) -> None:
    """Ask Slurm to cancel every job of the user."""
    ask(environment, "scancel", f"--user={user}")


def set_node_state(environment: Mapping[str, str], node: str, state: str) -> None:
    """What `scontrol update` does: `RESUME`, or `DOWN`."""
    ask(environment, "scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=nvrx-slurm")
