from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.inprocess.compose import Compose
from nvrx_slurm.inprocess.exception import InternalError, OptionError
from nvrx_slurm.inprocess.rank_assignment import (
    FilterCountGroupedByKey,
    Layer,
    LayerFlag,
    RankAssignmentCtx,
    ShiftRanks,
    Tree,
)
from nvrx_slurm.inprocess.state import FrozenState, State
from tests.unit.inprocess.worlds import Worlds

RESERVE, BACKFILL = LayerFlag.RESERVE, LayerFlag.BACKFILL


def trees(
    *layers: Layer, per_branch: Sequence[int], world_size_filter: Callable[[int], int] | None = None
) -> Callable[[int], Tree]:
    """A tree for each member: below the root, each branch of layer n has `per_branch[n]` neighbouring members."""

    def make(member: int) -> Tree:
        keys = ["root", *(f"{member // size}" for size in per_branch)]
        own = [
            Layer(layer.min_ranks, layer.max_ranks, key, layer.flag) for layer, key in zip(layers, keys, strict=True)
        ]
        return Tree(own, world_size_filter)

    return make


def test_all_are_active_up_to_the_limits():
    """In depth-first order each rank is active until its host, or the root, has its maximum."""
    worlds = Worlds(9, trees(Layer(max_ranks=5), Layer(max_ranks=2), per_branch=[3]))
    worlds.next()
    worlds.check()
    assert worlds.active == [0, 1, 3, 4, 6]
    assert worlds.order == list(range(9))


def test_a_host_in_reserve_takes_a_lost_hosts_place():
    """As in the documents' example, but smaller: a host that has lost a rank is left out as a whole, and a reserve
    host takes its place."""
    hosts = trees(Layer(4, 8, flag=RESERVE), Layer(4, 4, flag=RESERVE), per_branch=[4])
    worlds = Worlds(12, hosts)
    assert worlds.next() and worlds.active == [0, 1, 2, 3, 4, 5, 6, 7]
    worlds.next(2)
    worlds.check()
    assert sorted(worlds.discarded) == [0, 1, 3]
    assert worlds.active == [11, 10, 9, 8, 4, 5, 6, 7]
    worlds.next(5)
    worlds.check()
    assert worlds.active == [11, 10, 9, 8] and worlds.order == [8, 9, 10, 11]


def test_the_nearest_reserve_comes_first():
    """A host's own reserve is used before another host's, and in it the rank that was put there last."""
    worlds = Worlds(8, trees(Layer(flag=RESERVE), Layer(max_ranks=2, flag=RESERVE), per_branch=[4]))
    worlds.next()
    assert worlds.active == [0, 1, 4, 5]
    worlds.next(0)
    assert worlds.active == [3, 1, 4, 5]
    worlds.next(1)
    assert worlds.active == [3, 2, 4, 5]
    worlds.next(2)
    worlds.check()
    assert worlds.active == [3, 4, 5]  # the other host has its two already


def test_a_reserve_does_not_overfill_its_branch():
    """A lost host's ranks are replaced as far as the other hosts' limits allow; other numbers move up."""
    worlds = Worlds(6, trees(Layer(flag=RESERVE), Layer(max_ranks=2), per_branch=[3]))
    worlds.next()
    worlds.next(0, 1, 2)
    worlds.check()
    assert worlds.active == [3, 4]


def test_without_the_flag_a_reserve_is_not_used():
    """A rank in reserve stays there if its host's layer has no RESERVE, even if the root's layer has it."""
    worlds = Worlds(4, trees(Layer(max_ranks=3, flag=RESERVE), Layer(), per_branch=[4]))
    worlds.next()
    worlds.next(1)
    worlds.check()
    assert worlds.active == [0, 2]
    assert worlds.order == [0, 2, 3]


def test_backfill_moves_the_highest_of_its_domain():
    """Within its host the highest active rank takes the lost one's number; ranks of other hosts only move up."""
    worlds = Worlds(8, trees(Layer(), Layer(flag=BACKFILL), per_branch=[4]))
    worlds.next()
    worlds.next(1)
    worlds.check()
    assert worlds.active == [0, 3, 2, 4, 5, 6, 7]


def test_backfill_reaches_as_far_as_the_flag_does():
    """With the flag up to the root, the highest rank of the world takes the lost one's number."""
    worlds = Worlds(8, trees(Layer(flag=BACKFILL), Layer(flag=BACKFILL), per_branch=[4]))
    worlds.next()
    worlds.next(1)
    worlds.check()
    assert worlds.active == [0, 7, 2, 3, 4, 5, 6]


def test_ranks_without_a_replacement_move_up():
    """Without flags the active ranks move up, as with ShiftRanks."""
    worlds = Worlds(6, trees(Layer(), Layer(), per_branch=[3]))
    worlds.next()
    worlds.next(1, 4)
    worlds.check()
    assert worlds.active == worlds.order == [0, 2, 3, 5]


def test_the_world_size_filter_makes_reserves():
    """Ranks beyond the filter's size are in reserve, and are used when an active one is lost."""
    even = trees(Layer(flag=RESERVE), per_branch=[], world_size_filter=lambda size: size // 2 * 2)
    worlds = Worlds(5, even)
    worlds.next()
    assert worlds.active == [0, 1, 2, 3]
    worlds.next(1)
    worlds.check()
    assert worlds.active == [0, 4, 2, 3]
    worlds.next(0)
    worlds.check()
    assert worlds.active == [4, 2]


def test_a_filter_that_wants_more_than_there_is_is_refused():
    """The OptionError has the size that the filter got and the size that it returned."""
    worlds = Worlds(2, trees(Layer(), per_branch=[], world_size_filter=lambda size: size + 1))
    with pytest.raises(OptionError, match=r"world_size_filter\(2\) is 3; it must be from 0 to 2"):
        worlds.next()


def test_a_host_that_is_short_from_the_start_is_out_before_ranks_are_active():
    """A host below its minimum takes no active place, not even in the first iteration."""
    worlds = Worlds(6, trees(Layer(max_ranks=3), Layer(min_ranks=3), per_branch=[3]))
    worlds.next(0)
    worlds.check()
    assert sorted(worlds.discarded) == [1, 2]
    assert worlds.active == [3, 4, 5]


def test_a_world_below_the_roots_minimum_is_out():
    """If there are fewer ranks than the root's minimum, all are discarded."""
    worlds = Worlds(4, trees(Layer(min_ranks=4), per_branch=[]))
    assert len(worlds.next()) == 4
    assert worlds.next(3) == {}
    assert worlds.discarded == [0, 1, 2]


def test_branches_get_neighbouring_numbers(caplog: pytest.LogCaptureFixture):
    """Ranks that are assigned to hosts in turn are sorted by host, and the log says so once."""
    worlds = Worlds(4, lambda member: Tree([Layer(), Layer(key_or_fn=f"host-{member % 2}")]))
    with caplog.at_level(logging.WARNING, "nvrx.inprocess"):
        worlds.next()
    worlds.check()
    assert worlds.order == [0, 2, 1, 3]
    assert [record.args for record in caplog.records] == [(2, 4)]


def test_each_call_begins_with_a_tree_of_its_own():
    """A state that was never assigned starts with a new tree of the current ranks."""
    make = trees(Layer(), per_branch=[])
    kept = {member: make(member) for member in range(4)}
    for size in (4, 3):
        worlds = Worlds(size, kept.__getitem__)
        worlds.next()
        worlds.next(0)
        worlds.check()
        assert worlds.active == list(range(1, size))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (lambda member: Tree([Layer(key_or_fn=f"{member}")]), "must be the same on all ranks; it is '0' on rank 0"),
        (lambda member: Tree([Layer()] * (1 + member)), "Tree has 1 layers here, and 2 on rank 1"),
    ],
)
def test_trees_that_are_not_the_same_are_refused(tree: Callable[[int], Tree], message: str):
    """If ranks describe different trees, an OptionError names two of them."""
    with pytest.raises(OptionError, match=message):
        Worlds(2, tree).next()


def test_invalid_arguments_are_refused_when_the_tree_is_made():
    """An empty list of layers and negative numbers are OptionErrors at once."""
    with pytest.raises(OptionError) as caught:
        Tree([])
    assert caught.value.options == ("layers",)
    with pytest.raises(OptionError, match="-1") as caught:
        Layer(max_ranks=-1)
    assert caught.value.options == ("max_ranks",)


def test_a_part_that_renumbers_after_it_is_refused():
    """If another part renumbers after Tree, the world is not the one that Tree knows: an error."""
    worlds = Worlds(4, lambda _: Compose(_DropLast(), Tree([Layer()])))
    worlds.next()
    with pytest.raises(InternalError, match="must be the last part"):
        worlds.next()


class _DropLast(ShiftRanks):
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        last = ctx.state.world_size - 1
        changed = super().__call__(RankAssignmentCtx(ctx.state, ctx.published, {last}))
        return RankAssignmentCtx(
            State(rank=changed.state.rank, world_size=last, mode=ctx.state.mode), ctx.published, set()
        )


def test_a_part_that_puts_ranks_out_may_come_before_it():
    """A filter by key puts ranks out, and Tree replaces them."""
    worlds = Worlds(
        6,
        lambda member: Compose(
            Tree([Layer(max_ranks=2, flag=RESERVE)]),
            FilterCountGroupedByKey(f"{member // 2}", lambda count: count == 2),
        ),
    )
    worlds.next()
    assert worlds.active == [0, 1]
    worlds.next(0)
    worlds.check()
    assert worlds.discarded == [1] and worlds.active == [5, 4]


FLAGS = st.sampled_from([None, RESERVE, BACKFILL, RESERVE | BACKFILL])
LIMITS = st.one_of(st.none(), st.integers(1, 6))


@given(st.data(), st.integers(1, 14))
def test_its_constraints_hold(data: st.DataObject, size: int):
    """For any tree and losses there is one world; each branch has its minimum, and no more active ranks than its
    maximum; an active rank stays active unless the world_size_filter wants fewer."""
    layers = [Layer(data.draw(st.integers(0, 3)), data.draw(LIMITS), flag=data.draw(FLAGS)) for _ in range(3)]
    even = data.draw(st.booleans())
    per_branch = [4, 2]
    worlds = Worlds(size, trees(*layers, per_branch=per_branch, world_size_filter=_even if even else None))
    before: list[int] = []
    for lost in ((), *data.draw(st.lists(st.lists(st.integers(0, size - 1), max_size=4), max_size=3))):
        worlds.next(*{member for member in lost if member in worlds.states})
        worlds.check()
        for layer, branch_of in zip(layers, (lambda _: 0, lambda m: m // 4, lambda m: m // 2), strict=True):
            healthy, active = Counter(map(branch_of, worlds.states)), Counter(map(branch_of, worlds.active))
            assert all(count >= layer.min_ranks for count in healthy.values())
            assert all(count <= (size if layer.max_ranks is None else layer.max_ranks) for count in active.values())
        kept = [member for member in before if member in worlds.states]
        assert even or set(kept) <= set(worlds.active)
        before = worlds.active


def _even(size: int) -> int:
    return size // 2 * 2


def calls_of(work: Callable[[], object]) -> int:
    """The number of function calls in a piece of work, including those in C: a cost that does not depend on the
    machine."""
    count = 0

    def counted(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def fall_of_hosts(members: int) -> Callable[[], object]:
    """One rank's assignments in a group of hosts of 8 in racks of 8 hosts, half of them active: at the start, and
    after every second host has lost a rank."""
    layers = [
        Layer(8, members // 2, "root", RESERVE),
        Layer(8, None, "", RESERVE),
        Layer(8, 8, "", RESERVE | BACKFILL),
    ]
    published = {rank: ("root", f"rack-{rank // 64}", f"host-{rank // 8}") for rank in range(members)}
    lost = {rank for rank in range(members) if rank % 16 == 9}

    def run() -> None:
        tree = Tree(layers)
        ctx = tree(RankAssignmentCtx(State(rank=0, world_size=members), lambda: published, set()))
        ctx = tree(RankAssignmentCtx(ctx.state, dict, lost))
        assert (ctx.state.world_size, ctx.state.active_world_size) == (members // 2, members // 2)

    return run


def test_it_costs_in_proportion_to_the_world():
    """Eight times the ranks cost at most ten times the work: the cost for each rank does not grow with their
    number."""
    assert calls_of(fall_of_hosts(2048)) < 10 * calls_of(fall_of_hosts(256))


@pytest.mark.timeout(20)  # it takes some tenths of a second; if the cost were quadratic in the world, minutes
def test_a_world_of_16384_ranks():
    """In the largest supported world half of the ranks are lost at once, and the other half goes on."""
    fall_of_hosts(16_384)()


def test_keys_may_come_from_the_state():
    """A key that is a function gets this rank's first state."""
    seen: list[FrozenState] = []
    tree = Tree([Layer(key_or_fn=lambda state: f"{seen.append(state)}")])
    state = State(rank=3, world_size=4)
    assert tree.publish(state.freeze()) == ("None",)
    assert seen == [state.freeze()]
