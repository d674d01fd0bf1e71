"""Three or four ranks and their monitors, in every order, with every fault at every time: one outcome for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nvrx_slurm.inprocess.cycle import CyclePhase
from nvrx_slurm.inprocess.ledger import (
    AnyEntry,
    Completed,
    GroupLedger,
    Interrupted,
    IterationStage,
    Lost,
    Sealed,
    accepts,
    decode,
    fold,
)
from tests.unit.inprocess.group_model import Rank, Settings, fill, keep_two
from tests.unit.inprocess.store_model import Shared

SETTINGS = (
    Settings(3, fill, most_in_world=3, most_active=3),
    Settings(3, fill, most_in_world=3, most_active=2),  # one in reserve
    Settings(3, keep_two, most_in_world=2, most_active=2),  # one is left out
    Settings(4, fill, most_in_world=4, most_active=4),  # two may die in turn; the other two must still agree
)
ROUNDS = 400
"""The most steps for each rank until all have finished: many times as many as needed."""

ranks = st.integers(0, 3)
"""The index of a rank, modulo their number."""


class Interleavings(RuleBasedStateMachine):
    """Each rule is one step of one thread, or one fault."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Shared()
        self.ranks: list[Rank] = []

    @initialize(settings=st.sampled_from(SETTINGS), losses=st.integers(0, 3), rounds=st.sampled_from((0, 8)))
    def begin(self, settings: Settings, losses: int, rounds: int) -> None:
        """Either before all have joined, or with all in the function."""
        self.members, self.losses = settings.members, losses
        self.ranks = [Rank(member, settings, self.shared) for member in range(settings.members)]
        self.all_go_on(rounds)

    # --- steps

    @rule(
        which=ranks, entries=st.sampled_from((0, 1, 100)), proposal=st.sampled_from(("waits", "sent", "sent twice"))
    )
    def one_goes_on(self, which: int, entries: int, proposal: str) -> None:
        """It reads some new entries, takes a step, and may send a proposal."""
        rank = self.ranks[which % self.members]
        rank.listen(entries)
        rank.act()
        if proposal != "waits":
            rank.send(unanswered=proposal == "sent twice")

    @rule(rounds=st.integers(1, 5), answers=st.booleans())
    def all_go_on(self, rounds: int, answers: bool = True) -> None:
        """All take steps; the store takes their proposals now or later."""
        for _ in range(rounds):
            self.round(answers=answers)

    @rule(which=ranks, timeouts=st.booleans())
    def a_monitor_looks(self, which: int, timeouts: bool) -> None:
        self.ranks[which % self.members].watch(timeouts=timeouts)

    @rule(which=ranks)
    def a_monitor_judges_the_next(self, which: int) -> None:
        self.ranks[which % self.members].judge(self.ranks)

    # --- faults

    @precondition(lambda self: self.working())
    @rule(which=ranks, end=st.sampled_from((Rank.come_back, Rank.fail, Rank.hang)))
    def a_function_ends(self, which: int, end: Callable[[Rank], None]) -> None:
        end(_one_of(self.working(), which))

    @precondition(lambda self: self.may_lose() and self.working())
    @rule(which=ranks, how=st.sampled_from((Rank.abandon, Rank.terminate)))
    def one_is_unfit(self, which: int, how: Callable[[Rank], None]) -> None:
        how(_one_of(self.working(), which))

    @precondition(lambda self: self.may_lose())
    @rule(which=ranks, how=st.sampled_from((Rank.die, Rank.die_with_monitor, Rank.stand_still)), seen=st.booleans())
    def one_dies(self, which: int, how: Callable[[Rank], None], seen: bool) -> None:
        rank = _one_of([rank for rank in self.ranks if not rank.gone], which)
        how(rank)
        if seen:
            rank.watch()

    def may_lose(self) -> bool:
        """Whether one more may be lost: losing all ranks at once tests little."""
        unharmed = [rank for rank in self.ranks if not (rank.gone or rank.stuck or rank.condemned)]
        return len(unharmed) > self.members - self.losses

    def working(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.at_work]

    @precondition(lambda self: self.shared.log)
    @rule(data=st.data())
    def an_old_entry_comes_again(self, data: st.DataObject) -> None:
        """Another thread, a retry, or a dead process repeats an entry: it is known, and changes nothing."""
        before = self.agreed()
        self.shared.log.append(data.draw(st.sampled_from(self.shared.log)))
        after = self.agreed()
        assert {**_fields(after), "length": before.length} == _fields(before)

    # --- invariants

    def agreed(self) -> GroupLedger:
        return self.shared.ledger(self.members)

    def history(self) -> Iterator[tuple[GroupLedger, AnyEntry]]:
        """Each entry that counted, with the ledger before it."""
        ledger = GroupLedger(self.members)
        for entry in map(decode, self.shared.log):
            if accepts(ledger, entry):
                yield ledger, entry
            ledger = fold(ledger, [entry])

    @invariant()
    def all_know_a_prefix_of_what_is_agreed(self) -> None:
        entries = [decode(data) for data in self.shared.log]
        for rank in self.ranks:
            assert rank.cycle.ledger == fold(GroupLedger(self.members), entries[: rank.cycle.ledger.length])

    @invariant()
    def an_iteration_has_one_outcome(self) -> None:
        ended = [e.iteration for _, e in self.history() if isinstance(e, Completed)]
        ended += [b.iteration for b, e in self.history() if fold(b, [e]).iteration > b.iteration]
        assert len(set(ended)) == len(ended), f"ended twice: {ended}"

    @invariant()
    def no_rank_completes_what_another_restarts(self) -> None:
        completed = {rank.completed for rank in self.ranks} - {None}
        assert len(completed) <= 1
        for rank in self.ranks:
            for entered in rank.entered:
                assert all(entered.iteration <= done for done in completed if done is not None)

    @invariant()
    def all_who_enter_are_ranks_of_one_world(self) -> None:
        worlds: dict[int, list[tuple[int, int]]] = {}
        for rank in self.ranks:
            for entered in rank.entered:
                worlds.setdefault(entered.iteration, []).append((entered.rank, entered.world_size))
        for places in worlds.values():
            (size,) = {world_size for _, world_size in places}
            numbers = [number for number, _ in places]
            assert len(set(numbers)) == len(numbers)
            assert set(numbers) <= set(range(size))

    @invariant()
    def the_lost_are_in_no_world(self) -> None:
        for before, entry in self.history():
            if isinstance(entry, Sealed):
                assert entry.world_size - len(entry.missing) == before.left
        for rank in self.ranks:
            lost_at = [b.iteration for b, e in self.history() if isinstance(e, Lost) and e.member == rank.member]
            assert all(entered.iteration <= lost_at[0] for entered in rank.entered if lost_at)

    @invariant()
    def the_lost_are_dead_or_out(self) -> None:
        for member in self.agreed().lost:
            rank = self.ranks[member]
            assert not rank.alive or rank.cycle.phase is CyclePhase.LEAVING

    @invariant()
    def the_group_never_breaks(self) -> None:
        assert self.agreed().stage is not IterationStage.BROKEN, self.agreed().reason

    @invariant()
    def a_failure_is_of_a_rank_that_took_part(self) -> None:
        for before, entry in self.history():
            if isinstance(entry, Interrupted):
                assert entry.member not in before.lost

    # --- no more faults

    def round(self, *, answers: bool = True, timeouts: bool = False) -> None:
        for rank in self.ranks:
            rank.listen()
            rank.act()
            if answers:
                rank.send()
            rank.watch(timeouts=timeouts)
            rank.judge(self.ranks)

    def teardown(self) -> None:
        """When no more faults happen, all remaining ranks finish, with the same outcome."""
        for _ in range(ROUNDS):
            if all(rank.gone for rank in self.ranks):
                break
            for rank in self.ranks:
                rank.come_back()
            self.round(timeouts=True)
        assert all(rank.gone for rank in self.ranks), [rank.cycle for rank in self.ranks]
        for check in (self.no_rank_completes_what_another_restarts, self.an_iteration_has_one_outcome):
            check()
        lost = self.agreed().lost
        for rank in self.ranks:
            assert rank.completed is not None or not rank.alive or rank.member in lost


def _one_of(ranks: list[Rank], which: int) -> Rank:
    return ranks[which % len(ranks)]


def _fields(ledger: GroupLedger) -> dict[str, object]:
    return {name: getattr(ledger, name) for name in GroupLedger.__slots__}


Interleavings.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestInterleavings = Interleavings.TestCase
