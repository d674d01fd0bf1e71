from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field

import pytest

from nvrx_slurm.inprocess.abort import Abort, AbortTorchDistributed, AbortTransformerEngine
from nvrx_slurm.inprocess.compose import Compose
from nvrx_slurm.inprocess.exception import OptionError
from nvrx_slurm.inprocess.health_check import CudaHealthCheck, FaultCounter, HealthCheck
from nvrx_slurm.inprocess.initialize import Initialize, RetryController
from nvrx_slurm.inprocess.rank_assignment import (
    ActivateAllRanks,
    MaxActiveWorldSize,
    RankAssignment,
    RankFilter,
    ShiftRanks,
)
from nvrx_slurm.inprocess.state import FrozenState

STATE = FrozenState(rank=1, world_size=4, active_rank=1, active_world_size=4)


@dataclass(frozen=True)
class Notes(Initialize):
    """Records its name, and returns the state or None."""

    name: str
    notes: list[str] = field(compare=False)
    returns_state: bool = True

    def __call__(self, state: FrozenState) -> FrozenState:
        self.notes.append(self.name)
        return state if self.returns_state else None  # type: ignore[return-value]


def test_parts_run_from_right_to_left():
    """The last part is called first, as in a(b(c(state))), also in nested compositions."""
    notes: list[str] = []
    a, b, c, d = (Notes(name, notes) for name in "abcd")
    assert Compose(a, Compose(b, c), d)(STATE) is STATE
    assert notes == ["d", "c", "b", "a"]


def test_a_part_that_returns_nothing_passes_on_what_it_got():
    """If a callback forgets to return the state, the next part still gets it."""
    notes: list[str] = []
    assert Compose(Notes("a", notes), Notes("b", notes, returns_state=False))(STATE) is STATE
    assert notes == ["b", "a"]


def test_what_a_part_raises_ends_the_chain():
    """Parts further left are not called, and the part's own exception is raised."""
    notes: list[str] = []
    with pytest.raises(BaseException, match="max_iterations=1"):
        Compose(Notes("a", notes), RetryController(max_iterations=1))(FrozenState(rank=0, world_size=1, iteration=1))
    assert notes == []


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ((AbortTorchDistributed(), AbortTransformerEngine()), Abort),
        ((CudaHealthCheck(), FaultCounter()), HealthCheck),
        ((CudaHealthCheck(), CudaHealthCheck()), CudaHealthCheck),
        ((ActivateAllRanks(), MaxActiveWorldSize()), RankFilter),
        ((ActivateAllRanks(), ShiftRanks()), RankAssignment),
    ],
)
def test_a_composition_is_of_the_kind_of_its_parts(parts: tuple[object, ...], kind: type):
    """It is an instance of the nearest class that all parts share, and of Compose, so it can be used where a part
    can."""
    whole = Compose(*parts)
    assert isinstance(whole, kind)
    assert isinstance(whole, Compose)
    assert kind in type(whole).__bases__


def test_kinds_do_not_mix():
    """An Abort and a HealthCheck are called at different times: an OptionError names both."""
    with pytest.raises(OptionError, match="these are AbortTorchDistributed, FaultCounter"):
        Compose(AbortTorchDistributed(), FaultCounter())
    with pytest.raises(OptionError, match="at least one part"):
        Compose()


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda whole: pickle.loads(pickle.dumps(whole))])
def test_a_composition_can_be_copied(again):
    """Like its parts, it can also be pickled for another process."""
    whole = again(Compose(RetryController(3), RetryController(5)))
    assert isinstance(whole, RetryController)
    assert repr(whole) == f"Compose({RetryController(3)!r}, {RetryController(5)!r})"
    assert whole(STATE) is STATE
