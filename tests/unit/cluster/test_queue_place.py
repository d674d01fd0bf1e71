"""Why a job is pending: squeue's lines as values, and when the reason is shown."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nvrx_slurm.cluster.commands import CommandOutput
from nvrx_slurm.cluster.queue_place import QueuePlace, QueueReporter, places_of, queue_places
from nvrx_slurm.errors import MissingProgramError
from tests.still_clock import StillClock

# What Slurm 22.05.8 prints for `--format=%i|%V|%S|%r` with SLURM_TIME_FORMAT=%s.
LISTING = """\
1|1795475538|N/A|Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions
2|1795475538|N/A|Priority
4|1795475538|1795479138|BeginTime
8_3|1795475538|N/A|ReqNodeNotAvail, UnavailableNodes:n3
CLUSTER: alpha
"""


def test_squeue_says_why_since_when_and_until_when() -> None:
    """Each job has its own values, also an array's element; a line of another kind is skipped."""
    places = places_of(LISTING)
    assert list(places) == ["1", "2", "4", "8_3"]
    assert places["4"] == QueuePlace(
        job_id="4", reason="BeginTime", submitted_at=1795475538.0, expected_at=1795479138.0
    )
    assert places["8_3"].reason == "ReqNodeNotAvail, UnavailableNodes:n3"
    assert places["2"].expected_at is None
    assert all(place.meaning for place in places.values())


@pytest.mark.parametrize(
    ("reason", "contained"),
    [
        ("DependencyNeverSatisfied", "does not start unless"),
        ("JobHeldUser", "`scontrol release 7`"),
        ("QOSMaxJobsPerUserLimit", "limit"),
        ("AssocGrpNodeLimit", "limit"),
    ],
)
def test_a_reason_is_put_in_words(reason: str, contained: str) -> None:
    """Of two words that begin alike the longer one applies; families of words share one meaning."""
    assert contained in QueuePlace(job_id="7", reason=reason).meaning


def test_a_reason_that_is_not_known_is_shown_as_it_is() -> None:
    """Slurm has more than a hundred reasons."""
    assert QueuePlace(job_id="7", reason="Whatever").describe(0.0) == "Whatever"


def test_the_time_in_the_queue_and_the_expected_start_are_shown() -> None:
    """Both are relative to now; an expected start that has passed is left out."""
    place = QueuePlace(job_id="7", reason="Whatever", submitted_at=1000.0, expected_at=2000.0)
    assert place.describe(1130.0).startswith("Whatever; in the queue for 2m10s; Slurm expects to start it at ")
    assert place.describe(1130.0).endswith("in 14m30s")
    assert place.describe(2500.0) == "Whatever; in the queue for 25m"


def test_slurm_is_asked_once_for_all_jobs_of_a_cluster() -> None:
    """If Slurm does not answer, nothing is known."""
    asked = []

    def run(command: Sequence[str], *, timeout_s: float) -> CommandOutput:
        asked.append(command)
        return CommandOutput(0, LISTING, "")

    found = queue_places(["1", "8_3;alpha", "2", "9"], run)
    assert {job_id: place.job_id for job_id, place in found.items()} == {
        "1": "1", "2": "2", "8_3;alpha": "8_3;alpha"
    }  # fmt: skip
    assert [next(part for part in command if part.startswith("--jobs=")) for command in asked] == [
        "--jobs=1,2,9",
        "--jobs=8_3",
    ]

    def no_slurm(command: Sequence[str], *, timeout_s: float) -> CommandOutput:
        raise MissingProgramError("none")

    assert queue_places(["1"], no_slurm) == {}


def test_a_reason_is_reported_once_and_again_when_it_changes() -> None:
    """Slurm has no reason in the first moment; later it is asked once a minute at most."""
    clock, told, asked = StillClock(0.0), [], []

    def ask(job_ids: Sequence[str]) -> dict[str, QueuePlace]:
        asked.append(clock.now)
        reason = "None" if clock.now < 1.0 else "Resources" if clock.now < 100.0 else "Priority"
        return {"7": QueuePlace(job_id="7", reason=reason)}

    reporter = QueueReporter("7", told.append, clock=clock, ask=ask)
    while clock.now < 400.0:
        reporter.look()
        clock.sleep(0.5)
    assert [text.partition(":")[0] for text in told] == ["Resources", "Priority"]
    assert asked[:4] == [0.0, 1.0, 3.0, 7.0]
    assert len(asked) < 14
    assert reporter.place is not None
    assert reporter.place.reason == "Priority"
