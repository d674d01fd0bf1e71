"""Starting the daemons so that they outlive the command, and knowing afterwards which process each one is."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.lab.devcluster.places import Places
from nvrx_slurm.lab.devcluster.processes import Identity, Table, identify, lives
from nvrx_slurm.util.files import write_private
from nvrx_slurm.util.ownership import read_owned

# Set in every daemon's environment, so that one is found even if the command died before it wrote the record.
# Jobs do not inherit it: Slurm gives them the environment of sbatch and srun.
MARK = "NVRX_DEV_CLUSTER"
_TAIL_LINES = 15
_PR_SET_CHILD_SUBREAPER = 36
_prctl: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl


@dataclass(frozen=True)
class Daemon:
    """How to start one daemon: in the foreground, since it gets a session of its own here."""

    name: str
    command: Sequence[str | Path]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)


def start(daemon: Daemon, places: Places) -> None:
    """Start it detached from this process and its terminal, and record who it is. Raises NvrxError.

    It becomes the reaper of its orphans (prctl(2), PR_SET_CHILD_SUBREAPER): slurmstepd and what a job detaches
    stay its descendants, where otherwise they would be PID 1's and could not be found as this node's.
    """
    environment = {"PATH": os.defpath + ":/usr/sbin:/sbin", MARK: str(places.state), **daemon.environment}
    try:
        with places.errors(daemon.name).open("ab") as errors:
            process = subprocess.Popen(
                [str(part) for part in daemon.command],
                cwd=daemon.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
                # One system call, no lock: safe between fork and exec.
                preexec_fn=partial(_prctl, _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0),
            )
    except OSError as error:
        raise NvrxError(f"{daemon.command[0]} could not be started: {error.strerror}") from error
    process.returncode = 0  # no parent waits for it: keeps Popen from warning when it is collected
    identity = identify(process.pid)
    assert identity is not None  # our own child: at worst a zombie, which still has its start time
    write_private(places.daemons / f"{daemon.name}.json", msgspec.json.encode(identity))


def recorded(places: Places) -> dict[str, Identity]:
    """Daemon name → the process that is or was this daemon. A record that a crash of the machine has damaged is
    passed over: a daemon that lives is found by its mark."""
    found = {}
    for file in sorted(places.daemons.glob("[!.]*.json")):
        with contextlib.suppress(msgspec.DecodeError):
            found[file.stem] = msgspec.json.decode(read_owned(file), type=Identity)
    return found


def living(places: Places, table: Table) -> dict[str, int]:
    """Daemon name → pid, of those that live."""
    return {name: record.pid for name, record in recorded(places).items() if lives(record, table)}


def last_words(name: str, places: Places) -> str:
    """The end of the daemon's log, or of what it printed when it has no log, and the last errors before that."""
    for path in (places.log(name), places.errors(name)):
        if path.exists() and (lines := path.read_text(errors="replace").splitlines()):
            # mariadb-install-db ends with advice that is longer than the end.
            errors = [line for line in lines[:-_TAIL_LINES] if "error" in line.lower()][-_TAIL_LINES:]
            head = [f"--- errors in {path}:", *errors] if errors else []
            return "\n".join([*head, f"--- the end of {path}:", *lines[-_TAIL_LINES:]])
    return f"--- {name} left no log in {places.logs}"
