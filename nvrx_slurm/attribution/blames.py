"""What a failure says against nodes, and which nodes are suspect by it. Pure.

A node's score is the sum of what it is blamed for, each weighed by kind, and halved with each `HALF_LIFE_S` that has
passed since. From `THRESHOLD` on the node is suspect.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from itertools import islice

from nvrx_slurm.journal.verdicts import Attribution, Failed, FailureKey, Inquiry, Scope, Wire

HALF_LIFE_S = 24 * 3600.0
THRESHOLD = 1.0
# A blame that weighs less is dropped from the ledger.
FORGOTTEN_BELOW = 0.01

# How many blames are kept of one node: the heaviest.
MOST_PER_NODE = 32


class BlameKind(StrEnum):
    """What a node is blamed for."""

    SAID = "said"  # a person reported it
    HARDWARE = "hardware"  # the evidence names the node itself: GPU, memory, disk
    NETWORK = "network"  # its links
    STORAGE = "storage"  # what it mounts
    LOST = "lost"  # it was lost: itself, its link, or a switch


# One day after a hardware fault its node is still suspect, two days after it is not; one loss alone makes no suspect.
WEIGHTS: dict[BlameKind, float] = {
    BlameKind.SAID: 8.0,
    BlameKind.HARDWARE: 3.0,
    BlameKind.NETWORK: 1.5,
    BlameKind.STORAGE: 0.75,
    BlameKind.LOST: 0.6,
}


class Blame(Wire, frozen=True, kw_only=True):
    """One failure that one node is blamed for.

    `failure` names it: of several sources' blames of one node for it the heaviest counts. `at`: seconds
    since the epoch. `certainty`: from 0 to 1. `fault`, `job` (its folder) and `evidence` say where it comes from.
    """

    cluster: str
    node: str
    kind: BlameKind
    failure: str
    at: float
    certainty: float = 1.0
    fault: str = ""
    job: str = ""
    evidence: str = ""


class Suspect(Wire, frozen=True, kw_only=True):
    """A node with its blames, heaviest first. `until`: when it will be clear if nothing is added."""

    node: str
    score: float
    until: float
    blames: tuple[Blame, ...]

    @property
    def jobs(self) -> tuple[str, ...]:
        """The ids of the jobs that it failed in, last one first."""
        by_time = sorted(self.blames, key=lambda blame: -blame.at)
        return tuple(dict.fromkeys(blame.job.rpartition("/")[2] for blame in by_time if blame.job))


def weight(blame: Blame, now: float) -> float:
    """What a blame still weighs at `now`. One from the future (clocks differ) has its full weight."""
    age_s = max(0.0, now - blame.at)
    return WEIGHTS[blame.kind] * blame.certainty * math.exp2(-age_s / HALF_LIFE_S)


def merged(blames: Iterable[Blame], now: float) -> tuple[Blame, ...]:
    """Those that are worth keeping: each failure of a node once, none that hardly weighs anything."""
    heaviest: dict[tuple[str, str, str], Blame] = {}
    for blame in blames:
        identity = (blame.cluster, blame.node, blame.failure)
        known = heaviest.get(identity)
        if known is None or _rank(blame) < _rank(known):
            heaviest[identity] = blame
    kept: list[Blame] = []
    for of_one_node in _by_node(heaviest.values()).values():
        heavy = (blame for blame in _heaviest_first(of_one_node) if weight(blame, now) >= FORGOTTEN_BELOW)
        kept += islice(heavy, MOST_PER_NODE)
    return tuple(sorted(kept, key=lambda blame: (blame.cluster, blame.node, blame.at, blame.failure)))


def suspects(blames: Iterable[Blame], cluster: str, now: float) -> list[Suspect]:
    """The nodes of this cluster that are suspect at `now`, the worst first."""
    here = [blame for blame in merged(blames, now) if blame.cluster == cluster]
    found = []
    for (_, node), of_one_node in _by_node(here).items():
        score = math.fsum(weight(blame, now) for blame in of_one_node)
        if score >= THRESHOLD:
            # All blames halve at one rate, and so does their sum: it reaches the threshold after so many half-lives.
            until = now + HALF_LIFE_S * math.log2(score / THRESHOLD)
            reasons = tuple(_heaviest_first(of_one_node))
            found.append(Suspect(node=node, score=score, until=until, blames=reasons))
    return sorted(found, key=lambda suspect: (-suspect.score, suspect.node))


def _by_node(blames: Iterable[Blame]) -> dict[tuple[str, str], list[Blame]]:
    found: dict[tuple[str, str], list[Blame]] = {}
    for blame in blames:
        found.setdefault((blame.cluster, blame.node), []).append(blame)
    return found


def _heaviest_first(blames: Iterable[Blame]) -> list[Blame]:
    return sorted(blames, key=_rank)


def _rank(blame: Blame) -> tuple[float, float, tuple[str, ...]]:
    """The heaviest first. All weights halve at the same rate: the heavier one now was so before, and will always be.
    So the order depends neither on `now` nor on the order of arrival, also between equal ones."""
    heft = WEIGHTS[blame.kind] * blame.certainty
    said = (blame.kind, blame.failure, blame.fault, blame.job, blame.evidence)
    return (-math.log2(heft) - blame.at / HALF_LIFE_S if heft > 0 else math.inf, -blame.at, said)


# Failures of any other scope follow the job to each node that it runs on: they blame none.
KINDS = {Scope.NODE: BlameKind.HARDWARE, Scope.NETWORK: BlameKind.NETWORK, Scope.STORAGE: BlameKind.STORAGE}

# An attribution with a lower confidence does not count.
LEAST_CERTAINTY = 0.5

LONGEST_EVIDENCE = 300


def blames_of(inquiry: Inquiry, attributions: Iterable[Attribution], *, cluster: str, at: float) -> list[Blame]:
    """The blames for one failure, by its sources' attributions. `at`: seconds since the epoch."""
    failed, job = inquiry.failed, inquiry.key.job
    is_lost = failed is not None and is_loss(inquiry.key, failed)
    found: list[Blame] = []

    def blame(node: str, kind: BlameKind, fault: str, evidence: str, certainty: float = 1.0) -> None:
        found.append(
            Blame(
                cluster=cluster,
                node=node,
                kind=kind,
                failure=str(inquiry.key),
                at=at,
                certainty=certainty,
                fault=fault,
                job=job,
                evidence=evidence[:LONGEST_EVIDENCE],
            )
        )

    for each in attributions:
        kind = KINDS.get(each.scope)
        if kind is None or each.confidence < LEAST_CERTAINTY:
            continue
        if each.primary is None and is_lost:
            continue  # no line says why the node went: only the loss counts
        evidence = ""
        if (line := each.primary) is not None:
            # The blame names the job's folder already.
            evidence = f"{line.file.removeprefix(f'{job}/')}:{line.line}: {line.text}"
        for node in each.nodes:
            blame(node, kind, each.fault, evidence, min(each.confidence, 1.0))
    if failed is not None and is_lost:
        blame(failed.node, BlameKind.LOST, "node_lost", failed.cause)
    return found


def is_loss(key: FailureKey, failed: Failed) -> bool:
    """Whether a whole node was lost without notice. One that was drained or preempted reported that it left."""
    return key.rank is None and failed.rank is None and not failed.cause.startswith(f"{failed.node} left:")
