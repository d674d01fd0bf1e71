"""A job in Slurm's queue: why it waits, since when, and when Slurm expects to start it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

import msgspec

from nvrx_slurm.cluster.commands import Runner, SlurmPrograms, SystemRunner
from nvrx_slurm.cluster.slurm_text import by_cluster, on_cluster
from nvrx_slurm.errors import NvrxError
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.durations import words

_UNAVAILABLE = "nodes that it needs are down, drained or reserved; `sinfo -R` says why"
_LIMIT = "a limit of the account, the user or the QOS is reached"
_NEVER = "it does not start unless that is changed"

# By how Slurm's reason begins, the longer one first; see JOB REASON CODES in squeue(1).
_MEANINGS = {
    "None": "Slurm has not looked at it yet",
    "Resources": "it comes next, when the nodes that it needs are free",
    "Priority": "jobs of higher priority come first",
    "Nodes required for job are DOWN": _UNAVAILABLE,
    "ReqNodeNotAvail": _UNAVAILABLE,
    "JobHeldUser": "it is held; `scontrol release {job}` lets it start",
    "JobHeldAdmin": "an administrator holds it",
    "BeginTime": "it must not start before its begin time",
    "DependencyNeverSatisfied": f"a job that it depends on has not ended as it asks; {_NEVER}",
    "Dependency": "it depends on another job, which has not ended yet",
    "PartitionNodeLimit": f"it asks for more or fewer nodes than the partition allows; {_NEVER}",
    "PartitionTimeLimit": f"its time limit is longer than the partition's; {_NEVER}",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "BadConstraints": f"no node can ever have what it asks for; {_NEVER}",
    "Licenses": "it waits for a license",
    "Reservation": "it waits for its reservation to begin",
    "JobArrayTaskLimit": "the array's limit of running tasks is reached",
    "launch failed requeued held": "Slurm could not start it and holds it; `scontrol release {job}` tries again",
    "QOS": _LIMIT,
    "Assoc": _LIMIT,
    "MaxNodePerAccount": _LIMIT,
    "MaxMemPerLimit": f"it asks for more memory than a node or the QOS allows; {_NEVER}",
}


class QueuePlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pending job stands. `reason`: Slurm's own word. `expected_at`: when Slurm plans to start it, which
    changes as other jobs come and end (None: it has no plan for it yet)."""

    job_id: str
    reason: str
    submitted_at: float | None = None
    expected_at: float | None = None

    @property
    def meaning(self) -> str:
        """The reason in words; empty where Slurm's word is not known here."""
        found = next((text for word, text in _MEANINGS.items() if self.reason.startswith(word)), "")
        return found.format(job=self.job_id)

    def describe(self, now: float) -> str:
        """`Resources: it comes next, …; in the queue for 12m10s; Slurm expects to start it at 14:30, in 3m5s`."""
        parts = [f"{self.reason}: {self.meaning}" if self.meaning else self.reason]
        if self.submitted_at is not None:
            parts.append(f"in the queue for {words(float(max(0, round(now - self.submitted_at))))}")
        if self.expected_at is not None and self.expected_at > now:
            at, left_s = datetime.fromtimestamp(self.expected_at), self.expected_at - now
            day = "" if left_s < 12 * 3600 else f"{at:%Y-%m-%d} "
            parts.append(f"Slurm expects to start it at {day}{at:%H:%M}, in {words(float(round(left_s)))}")
        return "; ".join(parts)


def queue_places(job_ids: Sequence[str], runner: Runner | None = None) -> dict[str, QueuePlace]:
    """Of each of these jobs that is pending. One attempt; nothing where Slurm does not answer."""
    found: dict[str, QueuePlace] = {}
    programs = SlurmPrograms(runner or SystemRunner({"SLURM_TIME_FORMAT": "%s"}), patience_s=0.0)
    for cluster, numbers in by_cluster(job_ids).items():
        jobs = f"--jobs={','.join(numbers)}"
        try:
            listing = programs.ask(
                "squeue",
                *on_cluster(cluster),
                "--noheader",
                "--array",
                "--states=PENDING",
                jobs,
                "--format=%i|%V|%S|%r",
            )
        except NvrxError:
            continue
        for number, place in places_of(listing.stdout).items():
            if number in numbers:
                found[numbers[number]] = msgspec.structs.replace(place, job_id=numbers[number])
    return found


def places_of(stdout: str) -> dict[str, QueuePlace]:
    """squeue's lines `id|submitted|expected|reason`, with times in seconds since 1970."""
    found = {}
    for line in stdout.splitlines():
        # The reason is last, and is not split: it may be a sentence, in which nothing rules a bar out.
        fields = line.strip().split("|", 3)
        if len(fields) == 4:
            job_id, submitted, expected, reason = (field.strip() for field in fields)
            found[job_id] = QueuePlace(
                job_id=job_id,
                reason=reason.replace("_", " ") if reason.count("_") > 2 else reason,
                submitted_at=float(submitted) if submitted.isdecimal() else None,
                expected_at=float(expected) if expected.isdecimal() else None,
            )
    return found


# Between two questions why a job is pending: Slurm has no reason in the first moment, and seldom a new one later.
FIRST_LOOK_S, LONGEST_LOOK_S = 1.0, 60.0


class QueueReporter:
    """Tells why a job is pending: once it is known, and again whenever Slurm has another reason. `look` may be called
    as often as its caller likes; it asks Slurm seldom."""

    def __init__(
        self,
        job_id: str,
        tell: Callable[[str], None],
        *,
        clock: Clock | None = None,
        ask: Callable[[Sequence[str]], dict[str, QueuePlace]] = queue_places,
    ) -> None:
        self._job_id, self._tell, self._ask = job_id, tell, ask
        self._clock = clock or SystemClock()
        self._pause_s = FIRST_LOOK_S
        self._look_at = self._clock.monotonic()
        self.place: QueuePlace | None = None
        """What was told last."""

    def look(self) -> None:
        """Ask, if it is time."""
        if self._clock.monotonic() < self._look_at:
            return
        place = self._ask([self._job_id]).get(self._job_id)
        self._look_at = self._clock.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_LOOK_S)
        # `None` is Slurm's reason in the first moment: it has not looked at the job yet.
        if place is None or place.reason == "None" or (self.place and self.place.reason == place.reason):
            return
        self.place = place
        self._tell(place.describe(self._clock.wall()))
