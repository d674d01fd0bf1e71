"""What an attempt has brought into being and must not leave behind, in `held.jsonl` of its folder.

A line is on the disk when the call that writes it returns. So whoever comes after an attempt that was killed knows
what to end (`undo.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from nvrx_slurm.journal.records import Record
from nvrx_slurm.lab.devcluster.processes import Identity, identify
from nvrx_slurm.util.files import write_all
from nvrx_slurm.util.ownership import read_owned

if TYPE_CHECKING:
    from nvrx_slurm.api.handle import Job

HELD = "held.jsonl"
MARK = "NVRX_CI_ATTEMPT"
"""In the environment of an attempt and of all that it starts on this machine: its folder."""


class HeldCluster(Record, frozen=True, kw_only=True, tag_field="held", tag="cluster"):
    """A development cluster; its jobs go with it."""

    name: str


class HeldQueue(Record, frozen=True, kw_only=True, tag_field="held", tag="queue"):
    """Jobs may be submitted to this Slurm, with scripts that lie in the attempt's folder."""

    environment: dict[str, str]


class HeldJob(Record, frozen=True, kw_only=True, tag_field="held", tag="job"):
    """A job that was submitted. `environment`: what Slurm's programs need, to find it."""

    job_id: str
    base: str  # its folder is `<base>/<job id>`
    cluster: Literal["slurm", "local"]
    environment: dict[str, str]


class HeldProcess(Record, frozen=True, kw_only=True, tag_field="held", tag="process"):
    """A process of this machine, with all below it: the attempt itself, or what holds a disk or a network."""

    process: Identity


class HeldNothing(Record, frozen=True, kw_only=True, tag_field="held", tag="nothing"):
    """All of the lines above has ended."""


Held = HeldCluster | HeldQueue | HeldJob | HeldProcess | HeldNothing
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_decoder: msgspec.json.Decoder[Held] = msgspec.json.Decoder(Held)


class Hold:
    """One attempt's list, and the only writer of it. Every method raises OSError where the disk is full."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / HELD, _FLAGS, 0o600)

    def cluster(self, name: str) -> None:
        """A development cluster is about to be brought up."""
        self._write(HeldCluster(name=name))

    def queue(self, environment: Mapping[str, str]) -> None:
        """A job is about to be submitted to this Slurm: it may be accepted although its id is never heard."""
        self._write(HeldQueue(environment=dict(environment)))

    def job(self, job: Job, environment: Mapping[str, str]) -> None:
        """A job was submitted."""
        base = str(job.folder.parent)
        self._write(HeldJob(job_id=job.job_id, base=base, cluster=job.cluster, environment=dict(environment)))

    def process(self, pid: int) -> None:
        """This process, and all below it, must end; one that has ended is fine."""
        if (process := identify(pid)) is not None:
            self._write(HeldProcess(process=process))

    def nothing(self) -> None:
        """All has ended."""
        self._write(HeldNothing())

    def close(self) -> None:
        os.close(self._file)

    def _write(self, held: Held) -> None:
        write_all(self._file, msgspec.json.encode(held) + b"\n")
        os.fsync(self._file)


def standing(folder: Path) -> list[Held]:
    """What the attempt of this folder still holds, oldest first. A torn last line was not yet true.

    Raises UnsafePath: another user could have written it, and it names processes to kill and clusters to take down.
    """
    found: list[Held] = []
    with contextlib.suppress(FileNotFoundError):
        for line in read_owned(folder / HELD).splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                held = _decoder.decode(line)
                found = [] if isinstance(held, HeldNothing) else [*found, held]
    return found
