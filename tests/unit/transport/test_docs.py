"""docs/transport.md, compared with the code that it describes."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx_slurm.transport import errors, retrying, slots
from nvrx_slurm.transport.client import PayloadClient, PayloadsMissing
from nvrx_slurm.transport.retrying import Limits
from nvrx_slurm.transport.ring import RingMetrics, SharedRing
from nvrx_slurm.transport.server import PayloadServer, ServerLimits
from nvrx_slurm.transport.slots import State, diagram

PAGE = (Path(__file__).parents[3] / "docs" / "transport.md").read_text()


def test_the_diagram_is_that_of_slots() -> None:
    """Each state can be entered and left, and each step that changes a slot's state is drawn."""
    edges = re.findall(r"^    (\w+) --> (\w+) : (\w+)$", diagram(), re.MULTILINE)
    assert {before for before, _, _ in edges} == {after for _, after, _ in edges} == {state.name for state in State}
    assert {name for *_, name in edges} == {
        "begin", "publish", "abandon", "claim", "consume", "release", "take", "settle", "reclaim"
    }  # fmt: skip
    assert all(hasattr(slots, name) for *_, name in edges)


@pytest.mark.parametrize(
    ("heading", "made"),
    [
        ("`SharedRing.create`", SharedRing.create),
        ("`PayloadServer`", PayloadServer.__init__),
        ("`PayloadClient`", PayloadClient.__init__),
    ],
)
def test_every_option_is_documented_with_its_default(heading: str, made: Callable[..., object]) -> None:
    """The table has the options of each public class."""
    _, _, rest = PAGE.partition(f"| option of {heading} | default | |\n")
    told = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \| .+ \|$", rest.partition("\n\n")[0], re.MULTILINE))
    parameters = inspect.signature(made).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    assert {name: _value(text) for name, text in told.items()} == _comparable(defaults)


@pytest.mark.parametrize("limits", [Limits, ServerLimits])
def test_every_limit_is_documented_with_its_default(limits: type[Limits | ServerLimits]) -> None:
    """The table has the limits of both sides."""
    told = dict(re.findall(rf"^\| `{limits.__name__}\.(\w+)` \| `(.+?)` \| .+ \|$", PAGE, re.MULTILINE))
    assert {name: _value(text) for name, text in told.items()} == dataclasses.asdict(limits())


def test_every_error_is_documented() -> None:
    """The table has a row for each error."""
    kinds = [*(name for name, kind in vars(errors).items() if _is_error(kind)), PayloadsMissing.__name__]
    assert len(kinds) > 8
    assert [name for name in kinds if f"\n| `{name}` | " not in PAGE] == []


def test_every_number_of_a_rings_metrics_is_documented() -> None:
    """The page names all fields."""
    assert [field for field in RingMetrics._fields if f"`{field}`" not in PAGE] == []


def test_the_documented_bounds_of_retrying_and_quarantine_are_those_of_the_code() -> None:
    """The sentences have the numbers of the code."""
    text = " ".join(PAGE.split())
    limits = Limits()
    for sentence in (
        f"gets {limits.answer_s:g} s and the time that its size needs at {limits.bytes_per_s / 1e6:g} MB/s",
        f"after a pause of {limits.pause_s * 1000:g} ms, doubled each time, {retrying.LONGEST_PAUSE_S:g} s at most",
        f"after {retrying.BUSY_PAUSE_S * 1000:g} ms, doubled each time, {retrying.LONGEST_BUSY_PAUSE_S * 1000:g} ms",
        f"is not asked for {retrying.QUARANTINE_S:g} s, after its next fault for "
        f"{retrying.QUARANTINE_S * retrying.GROWTH:g} s, and so on, {retrying.LONGEST_S:g} s at most",
    ):
        assert sentence in text
    assert f"others come first for {retrying.HURRIED_S:g} s" in text
    assert retrying.JITTER == 0.2
    assert "up to a fifth longer or shorter by chance" in text


def _is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, errors.TransportError) and kind is not errors.TransportError


def _value(text: str) -> object:
    """A default as Python has it: `64 << 20`, `("shm", "tcp")`, `None`."""
    number, shift, bits = text.partition(" << ")
    return int(number) << int(bits) if shift else ast.literal_eval(text)


def _comparable(defaults: dict[str, object]) -> dict[str, object]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in defaults.items()}
