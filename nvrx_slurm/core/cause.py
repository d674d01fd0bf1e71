"""Which of a cycle's failures is the cause: a table of evidence.

When a worker or a node dies, its peers lose their connections to it, and their exceptions often reach the controller
first. Where the bound for a hang is short, its peers are hung before it counts as lost. The teardown begins with the
first report. The cause is settled when the next rendezvous could close: by then each live node has reported how its
workers ended, and the failure detector has judged each silent one.
"""

from __future__ import annotations

from typing import Literal

from nvrx_slurm.core.state import Failure
from nvrx_slurm.jobspec.model import FaultToleranceSpec

Evidence = Literal["node_lost", "killed", "hung", "failed", "peer_lost"]

# The lowest is the cause; between equals the one that happened first.
RANKS: dict[Evidence, int] = {
    "node_lost": 0,
    "killed": 0,  # by a signal that is not its agent's: the kernel's, the out-of-memory killer's, a person's
    "hung": 0,
    "failed": 0,  # an exception or an exit code of its own
    "peer_lost": 1,  # a consequence: the worker lost the connection to a peer
}

# What happens so long after the first report did not cause it. A dying process may take seconds to give back its
# memory, and its node's connection closes only after its last process.
WITHIN_S = 10.0


def evidence_of(failure: Failure) -> Evidence:
    """Which kind of evidence a failure is."""
    if failure.kind == "node":
        return "node_lost"
    if failure.hung:
        return "hung"
    if failure.peer_lost:  # a C++ exception that says so ends in SIGABRT
        return "peer_lost"
    return "failed" if failure.signal is None else "killed"


def is_symptom(failure: Failure, bounds: FaultToleranceSpec) -> bool:
    """Whether the first report may be a consequence of what is yet to be reported: a lost connection to a peer, and a
    hang where a worker counts as hung before its peer's node counts as lost."""
    if not failure.hung:
        return failure.peer_lost
    hang, beats = bounds.hang, bounds.heartbeat
    of_the_job = (hang.step_timeout, hang.startup_timeout, hang.no_output, hang.exit_skew)
    bounds_s = of_the_job if failure.hang_limit_s is None else (failure.hang_limit_s,)
    return any(each is not None and each <= beats.timeout + beats.interval for each in bounds_s)


def explains(failure: Failure, began: float, known: Failure, first_noticed: float) -> bool:
    """Whether `failure` is the cause rather than `known`. `began`: it did not happen before. `first_noticed`: when
    the first report of the cycle came."""
    # The peers of a node without power wait for it, and are hung before it has been silent for long enough.
    if known.hung and failure.kind == "node" and began < known.noticed:
        return True
    return began <= first_noticed + WITHIN_S and outranks(failure, known)


def outranks(failure: Failure, known: Failure) -> bool:
    """Whether the evidence alone says that `failure` is the cause rather than `known`."""
    return _order(failure) < _order(known)


def _order(failure: Failure) -> tuple[int, float]:
    return RANKS[evidence_of(failure)], failure.noticed
