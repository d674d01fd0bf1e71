"""All ranks of a group, each with its own rank assignment, through several iterations."""

from __future__ import annotations

from collections.abc import Callable

from nvrx_slurm.inprocess.exception import RankDiscarded
from nvrx_slurm.inprocess.rank_assignment import RankAssignment, RankAssignmentCtx
from nvrx_slurm.inprocess.state import Mode, State


class Worlds:
    """`states`: the state of each remaining member. `discarded`: the members that the assignment has left out, in
    order."""

    def __init__(self, members: int, make: Callable[[int], RankAssignment]) -> None:
        self.states = {member: State(rank=member, world_size=members) for member in range(members)}
        self.discarded: list[int] = []
        self._assignments = {member: make(member) for member in self.states}

    def next(self, *lost: int) -> dict[int, State]:
        """Makes the next iteration, without these members."""
        out = {self._rank(member) for member in lost}
        left = {member: state for member, state in self.states.items() if member not in lost}
        published = {self._rank(member): self._assignments[member].publish(left[member].freeze()) for member in left}
        self.states = {}
        for member, state in left.items():
            ctx = RankAssignmentCtx(state, lambda: published, set(out))
            try:
                self.states[member] = self._assignments[member](ctx).state
            except RankDiscarded:
                self.discarded.append(member)
        return self.states

    def _rank(self, member: int) -> int:
        rank = self.states[member].rank
        assert rank is not None
        return rank

    @property
    def order(self) -> list[int]:
        """The members by rank."""
        return sorted(self.states, key=self._rank)

    @property
    def active(self) -> list[int]:
        """The members that call the function, by active rank."""
        ranks = {member: state.active_rank for member, state in self.states.items() if state.active_rank is not None}
        return sorted(ranks, key=ranks.__getitem__)

    def check(self) -> None:
        """Checks that they make one world: each number once, and the same sizes for all."""
        states = list(self.states.values())
        assert sorted(self._rank(member) for member in self.states) == list(range(len(states)))
        assert {state.world_size for state in states} <= {len(states)}
        assert {state.active_world_size for state in states} <= {len(self.active)}
        assert [self.states[member].active_rank for member in self.active] == list(range(len(self.active)))
        for state in states:
            assert state.mode is (Mode.INACTIVE if state.active_rank is None else Mode.ACTIVE)
