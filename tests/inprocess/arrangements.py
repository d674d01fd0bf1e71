"""Rank assignments, by the names that scenarios use."""

from __future__ import annotations

from collections.abc import Callable

from nvrx_slurm import inprocess
from nvrx_slurm.inprocess.rank_assignment import RankAssignment


def _two_active() -> RankAssignment:
    return inprocess.Compose(inprocess.MaxActiveWorldSize(2), inprocess.ShiftRanks())


def _even_active() -> RankAssignment:
    return inprocess.Compose(inprocess.ActiveWorldSizeDivisibleBy(2), inprocess.ShiftRanks())


def _filled_gaps() -> RankAssignment:
    return inprocess.Compose(inprocess.ActivateAllRanks(), inprocess.FillGaps())


def _shifted() -> RankAssignment:
    return inprocess.Compose(inprocess.ActivateAllRanks(), inprocess.ShiftRanks())


def _pairs() -> RankAssignment:
    """Ranks form pairs, as the GPUs of a host do: a rank without its partner cannot be used."""
    by_pair = inprocess.FilterCountGroupedByKey(
        key_or_fn=lambda state: state.initial_rank // 2, condition=lambda count: count == 2
    )
    return inprocess.Compose(inprocess.ActivateAllRanks(), inprocess.ShiftRanks(), by_pair)


ARRANGEMENTS: dict[str, Callable[[], RankAssignment]] = {
    "default": _shifted,
    "two active": _two_active,
    "even active": _even_active,
    "filled gaps": _filled_gaps,
    "pairs": _pairs,
}
