"""Which nodes are suspect: what is blamed, how much it weighs, and for how long."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.attribution.blames import (
    FORGOTTEN_BELOW,
    HALF_LIFE_S,
    MOST_PER_NODE,
    THRESHOLD,
    WEIGHTS,
    Blame,
    BlameKind,
    blames_of,
    merged,
    suspects,
    weight,
)
from nvrx_slurm.journal.verdicts import Attribution, Evidence, Failed, FailureKey, Inquiry, Scope, Verdict

NOW = 1_800_000_000.0
DAY_S = 86400.0


def blame(node: str = "n1", kind: BlameKind = BlameKind.HARDWARE, **changes: Any) -> Blame:
    return Blame(**{"cluster": "alpha", "node": node, "kind": kind, "failure": "f1", "at": NOW} | changes)


def names(blames: list[Blame], now: float = NOW, cluster: str = "alpha") -> list[str]:
    return [suspect.node for suspect in suspects(blames, cluster, now)]


# ---- tables


@pytest.mark.parametrize(
    ("kinds", "days", "is_suspect"),
    [
        ([BlameKind.HARDWARE], 0, True),
        ([BlameKind.HARDWARE], 1, True),
        ([BlameKind.HARDWARE], 2, False),
        ([BlameKind.LOST], 0, False),
        ([BlameKind.LOST] * 2, 0, True),
        ([BlameKind.LOST] * 2, 1, False),
        ([BlameKind.NETWORK], 0, True),
        ([BlameKind.NETWORK], 1, False),
        ([BlameKind.STORAGE], 0, False),
        ([BlameKind.SAID], 2.9, True),
        ([BlameKind.SAID], 3.1, False),
    ],
)
def test_what_makes_a_suspect_and_for_how_long(kinds: list[BlameKind], days: float, is_suspect: bool) -> None:
    """A hardware fault counts for more than a day, a single loss not at all, a person's report for three days."""
    blames = [blame(kind=kind, failure=str(number)) for number, kind in enumerate(kinds)]
    assert names(blames, NOW + days * DAY_S) == (["n1"] if is_suspect else [])


def test_a_score_halves_with_each_half_life() -> None:
    """After one half-life the weight is exactly half."""
    assert weight(blame(), NOW + HALF_LIFE_S) == WEIGHTS[BlameKind.HARDWARE] / 2
    assert weight(blame(certainty=0.5), NOW) == WEIGHTS[BlameKind.HARDWARE] / 2


def test_a_clock_that_is_ahead_makes_nothing_heavier() -> None:
    """The clocks of nodes differ, so a blame may be dated in the future."""
    assert weight(blame(at=NOW + 500), NOW) == WEIGHTS[BlameKind.HARDWARE]


def test_a_suspect_says_when_it_will_be_clear() -> None:
    """The time is right if no blame is added until then."""
    blames = [blame(failure="a"), blame(kind=BlameKind.LOST, failure="b", at=NOW - DAY_S)]
    (suspect,) = suspects(blames, "alpha", NOW)
    assert names(blames, suspect.until - 1) == ["n1"]
    assert names(blames, suspect.until + 1) == []


def test_what_several_sources_say_of_one_failure_counts_once() -> None:
    """Of several blames for one failure only the heaviest counts."""
    blames = [blame(kind=BlameKind.LOST), blame(certainty=0.6), blame(certainty=0.9), blame(certainty=0.9)]
    (suspect,) = suspects(blames, "alpha", NOW)
    assert suspect.score == pytest.approx(0.9 * WEIGHTS[BlameKind.HARDWARE])
    assert len(suspect.blames) == 1


def test_an_old_word_does_not_hide_a_fresh_fault() -> None:
    """Of the blames for one failure, the one that weighs most today counts, not the one that weighed most when it was
    made."""
    blames = [blame(kind=BlameKind.SAID, at=NOW - 9 * DAY_S), blame(kind=BlameKind.HARDWARE)]
    (suspect,) = suspects(blames, "alpha", NOW)
    assert [each.kind for each in suspect.blames] == [BlameKind.HARDWARE]


def test_two_clusters_nodes_are_two_nodes() -> None:
    """Though both are called n1: what clears the one leaves the other suspect."""
    blames = [blame(cluster="alpha"), blame(cluster="beta"), blame(cluster="beta", node="n2")]
    assert names(blames) == ["n1"]
    assert names(blames, cluster="beta") == ["n1", "n2"]


def test_the_worst_comes_first_with_its_heaviest_reason() -> None:
    """It also has the jobs in which the node failed, the last one first."""
    blames = [
        blame("n1", BlameKind.NETWORK),
        blame("n2", BlameKind.LOST, failure="a", at=NOW - 10, job="/jobs/7"),
        blame("n2", BlameKind.HARDWARE, failure="b", at=NOW - 60, job="/jobs/5", fault="xid_79"),
    ]
    first, second = suspects(blames, "alpha", NOW)
    assert (first.node, first.blames[0].fault, first.jobs, second.node) == ("n2", "xid_79", ("7", "5"), "n1")


# ---- search

_blames = st.lists(
    st.builds(
        Blame,
        cluster=st.sampled_from(["alpha", "beta"]),
        node=st.sampled_from(["n1", "n2"]),
        kind=st.sampled_from(BlameKind),
        failure=st.sampled_from([f"f{number}" for number in range(5)]),
        at=st.floats(NOW - 10 * DAY_S, NOW + DAY_S),
        certainty=st.floats(0.0, 1.0),
        fault=st.sampled_from(["", "x"]),
    ),
    max_size=12,
)


@given(_blames, st.randoms(use_true_random=False))
def test_the_order_of_blames_does_not_matter(blames: list[Blame], random: Any) -> None:
    """Nor does it matter in how many portions they arrive."""
    shuffled = list(blames)
    random.shuffle(shuffled)
    half = len(shuffled) // 2
    assert merged(shuffled, NOW) == merged(blames, NOW)
    assert merged((*merged(shuffled[half:], NOW), *shuffled[:half]), NOW) == merged(blames, NOW)
    assert suspects(shuffled, "alpha", NOW) == suspects(blames, "alpha", NOW)


@given(_blames, st.floats(0, 5 * DAY_S), st.floats(0, 5 * DAY_S))
def test_time_alone_makes_no_node_more_suspect(blames: list[Blame], sooner_s: float, more_s: float) -> None:
    """Each score falls, and a node that is clear stays clear."""
    sooner = {suspect.node: suspect.score for suspect in suspects(blames, "alpha", NOW + sooner_s)}
    later = {suspect.node: suspect.score for suspect in suspects(blames, "alpha", NOW + sooner_s + more_s)}
    assert later.keys() <= sooner.keys()
    # What is dropped from the ledger meanwhile may make a sum smaller, never larger.
    assert all(later[node] <= sooner[node] * (1 + 1e-9) for node in later)


@given(_blames, st.sampled_from(BlameKind))
def test_one_more_failure_makes_no_node_less_suspect(blames: list[Blame], kind: BlameKind) -> None:
    """That holds for the node that is blamed, and for the others."""
    before = {suspect.node: suspect.score for suspect in suspects(blames, "alpha", NOW)}
    after = {
        suspect.node: suspect.score for suspect in suspects([*blames, blame(kind=kind, failure="new")], "alpha", NOW)
    }
    assert all(after[node] >= score * (1 - 1e-9) for node, score in before.items())


@given(_blames)
def test_saying_it_twice_changes_nothing(blames: list[Blame]) -> None:
    """A retry, a replay or a second controller may report a blame twice."""
    assert merged(blames + blames, NOW) == merged(blames, NOW)


def test_the_ledger_stays_small() -> None:
    """Blames that hardly weigh anything are dropped; for each node the heaviest are kept."""
    many = [blame(failure=str(number), certainty=number / 100) for number in range(100)]
    kept = merged(many, NOW)
    assert {entry.failure for entry in kept} == {str(number) for number in range(100 - MOST_PER_NODE, 100)}
    old_s = HALF_LIFE_S * math.log2(WEIGHTS[BlameKind.HARDWARE] / FORGOTTEN_BELOW)
    assert merged([blame()], NOW + old_s - 1) != ()
    assert merged([blame()], NOW + old_s + 1) == ()
    assert THRESHOLD > FORGOTTEN_BELOW


# ---- which nodes a failure blames

KEY = FailureKey(job="/jobs/7", generation=0, replica="main-0", cycle=2, rank=3)


def inquiry(rank: int | None = 3, **failed: Any) -> Inquiry:
    key = FailureKey(job="/jobs/7", generation=0, replica="main-0", cycle=2, rank=rank)
    return Inquiry(key=key, paths=(), failed=Failed(**{"cause": "x", "node": "n2", "rank": rank} | failed))


def said(scope: Scope, confidence: float = 0.9, nodes: tuple[str, ...] = ("n2",)) -> Attribution:
    line = Evidence(file="/jobs/7/logs/rank-3.err", line=7, text="Xid 79: GPU has fallen off the bus")
    return Attribution(
        source="lib", verdict=Verdict.RESTART, scope=scope, confidence=confidence, nodes=nodes, primary=line,
        fault="xid_79",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("scope", "kind"),
    [(Scope.NODE, BlameKind.HARDWARE), (Scope.NETWORK, BlameKind.NETWORK), (Scope.STORAGE, BlameKind.STORAGE)],
)
def test_a_node_is_blamed_for_what_is_its_own(scope: Scope, kind: BlameKind) -> None:
    """The blame has the failure and the log line that it rests on."""
    (found,) = blames_of(inquiry(), [said(scope)], cluster="alpha", at=NOW)
    assert (found.cluster, found.node, found.kind, found.at) == ("alpha", "n2", kind, NOW)
    assert (found.failure, found.job, found.fault) == (str(KEY), "/jobs/7", "xid_79")
    assert found.evidence == "logs/rank-3.err:7: Xid 79: GPU has fallen off the bus"


@pytest.mark.parametrize("scope", [Scope.USER_CODE, Scope.DATA, Scope.SCHEDULER, Scope.UNKNOWN])
def test_no_node_is_blamed_for_what_would_follow_the_job_elsewhere(scope: Scope) -> None:
    """A source that is not sure blames no node either."""
    assert blames_of(inquiry(), [said(scope), said(Scope.NODE, 0.4)], cluster="alpha", at=NOW) == []


def test_a_node_that_is_lost_is_blamed_a_little_and_one_that_left_is_not() -> None:
    """A drained or preempted node did nothing wrong."""
    (found,) = blames_of(inquiry(None, cause="n2 lost: connection to its agent closed"), [], cluster="alpha", at=NOW)
    assert (found.node, found.kind, found.evidence) == (
        "n2",
        BlameKind.LOST,
        "n2 lost: connection to its agent closed",
    )
    mere = msgspec.structs.replace(said(Scope.NODE), primary=None)
    (found,) = blames_of(
        inquiry(None, cause="n2 lost: connection to its agent closed"), [mere], cluster="alpha", at=NOW
    )
    assert found.kind is BlameKind.LOST  # no line says why the node was lost
    assert blames_of(inquiry(None, cause="n2 left: preempted"), [], cluster="alpha", at=NOW) == []
    assert blames_of(inquiry(3, cause="rank 3 on n2 failed"), [], cluster="alpha", at=NOW) == []
