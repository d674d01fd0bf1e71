"""Patterns: the values that each notation accepts."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from msgspec.structs import replace

from nvrx_slurm.journal.verdicts import Attribution, Evidence, Verdict
from nvrx_slurm.lab.flow.parsing import parse_pattern
from nvrx_slurm.lab.flow.patterns import Trial, binds, captures

Nodes = tuple[str, ...]
Pids = dict[int, int]
Phases = dict[str, float]
Action = Literal["stop", "ignore"]

LINE = Evidence(file="rank-3.err", line=7, text="MemoryError", rank=3)
OOM = Attribution(source="lib", verdict=Verdict.STOP, fault="host_oom")

# as written, the field's type, values that fit, values that do not
CASES: list[tuple[Any, Any, list[Any], list[Any]]] = [
    ("3", int, [3], [4, None]),
    ("3", str, ["3"], ["4", 3]),
    ("3", int | None, [3], [None]),
    (None, int | None, [None], [0]),
    ("true", bool, [True], [False]),
    ("1.5", float, [1.5], [1.4]),
    ("500ms", float, [0.5], [500.0]),
    ("stop", Action, ["stop"], ["ignore"]),
    (">= 5", int, [5, 6], [4]),
    ("> 5", int | None, [6], [5, None]),
    ("<= 2s", float, [2.0, 0.1], [2.1]),
    ("<5", int, [4], [5]),
    ("!= 5", int | None, [4, None], [5]),
    ("!= n1", str, ["n2"], ["n1"]),
    ("!= null", str | None, ["null", "n1"], [None]),
    ("!= ~", int | None, [0], [None]),
    ("~ ^n[12]$", str, ["n1"], ["n11", "xn1"]),
    ("~ closed", str | None, ["connection_closed"], [None, "fenced"]),
    ("tether_lost", str, ["connection_closed"], ["heartbeat_timeout"]),  # the name of older flows
    ("!= tether_lost", str, ["heartbeat_timeout"], ["connection_closed"]),
    (["n1", "!= n1"], Nodes, [("n1", "n2")], [("n1",), ("n1", "n1"), ("n1", "n2", "n3")]),
    ([], Nodes, [()], [("n1",)]),
    ({"contains": "n1"}, Nodes, [("n0", "n1")], [(), ("n0",)]),
    ({"length": ">= 2"}, Nodes, [("a", "b")], [("a",)]),
    ({"contains": "n1", "length": "1"}, Nodes, [("n1",)], [("n1", "n2"), ("n2",)]),
    ({"2": "> 10", "3": "5"}, Pids, [{1: 1, 2: 11, 3: 5}], [{2: 11}, {2: 9, 3: 5}]),
    ({"contains": "2"}, Pids, [{2: 7}], [{7: 2}]),
    ({"length": "0"}, Pids, [{}], [{1: 1}]),
    ({"decided": "< 1s"}, Phases, [{"decided": 0.2, "closed": 9.0}], [{"closed": 0.1}]),
    ({"verdict": "STOP", "fault": "~ oom"}, Attribution, [OOM], [replace(OOM, verdict=Verdict.RESTART)]),
    ({"primary": {"rank": "3"}}, Attribution, [replace(OOM, primary=LINE)], [OOM]),
    ({"2": "~ step"}, dict[int, str], [{2: "train.py:3 in step"}], [{2: "x"}, "train.py:3 in step", None]),
    ({"primary": None}, Attribution, [OOM], [replace(OOM, primary=LINE)]),
    ({"step": ["> 3", "< 1s"]}, dict[str, tuple[int, float]], [{"step": (4, 0.5)}], [{"step": (4, 1.5)}]),
]


@pytest.mark.parametrize(("raw", "kind", "fitting", "others"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_what_fits(raw: Any, kind: Any, fitting: list[Any], others: list[Any]) -> None:
    """A pattern accepts exactly the values that it means, by the field's own type."""
    pattern = parse_pattern(raw, kind)
    assert [value for value in (*fitting, *others) if pattern.fits(value, Trial({}))] == fitting


def fit(raw: Any, kind: Any, value: Any, known: dict[str, Any], *, may_bind: bool = True) -> dict[str, Any] | None:
    trial = Trial(known, lambda name: may_bind)
    return trial.new if parse_pattern(raw, kind).fits(value, trial) else None


def test_a_capture_binds_once_and_compares_afterwards() -> None:
    """A capture gets its value at its first use, also within one value."""
    assert fit("$a", str, "n1", {}) == {"a": "n1"}
    assert fit("$a", str, "n1", {"a": "n1"}) == {}
    assert fit("$a", str, "n1", {"a": "n2"}) is None
    assert fit(["$a", "$a"], Nodes, ("n1", "n1"), {}) == {"a": "n1"}
    assert fit(["$a", "$a"], Nodes, ("n1", "n2"), {}) is None


def test_an_item_that_does_not_fit_binds_nothing() -> None:
    """`contains` tries each item; a capture is bound by the item that fits."""
    pattern = parse_pattern({"secondary": {"contains": {"rank": "$rank", "text": "MemoryError"}}}, Attribution)
    trial = Trial({}, lambda name: True)
    assert pattern.fits(replace(OOM, secondary=(replace(LINE, rank=1, text="Broken pipe"), LINE)), trial)
    assert trial.new == {"rank": 3}
    assert not pattern.fits(replace(OOM, secondary=(replace(LINE, rank=1),)), trial)


def test_a_capture_that_may_not_bind_fits_nothing() -> None:
    """An unbound capture that another expectation is to bind fits no value."""
    assert fit("$a", str, "n1", {}, may_bind=False) is None
    assert fit("$a", str, "n1", {"a": "n1"}, may_bind=False) == {}


def test_a_comparison_does_not_bind() -> None:
    """`!= $a` compares with the value of `$a`; without a value it fits nothing."""
    assert fit("!= $a", str, "n1", {"a": "n2"}) == {}
    assert fit("> $a", int, 3, {"a": 3}) is None
    assert fit("> $a", int, 3, {"a": "n1"}) is None
    assert fit("> $a", int, 3, {"a": None}) is None
    assert fit("!= $a", int, 3, {"a": "n1"}) == {}
    assert fit("!= $a", str, "n1", {}) is None
    assert fit(["$a", "!= $a"], Nodes, ("n1", "n2"), {}) == {"a": "n1"}
    assert fit(["$a", "!= $a"], Nodes, ("n1", "n1"), {}) is None
    assert list(captures(parse_pattern(["$a", "!= $b"], Nodes))) == ["a", "b"]
    assert list(binds(parse_pattern(["$a", "!= $b"], Nodes))) == ["a"]


@pytest.mark.parametrize("raw", ["3", ">= 5", "$a", "!= $a"])
def test_a_pattern_is_printed_as_it_was_written(raw: str) -> None:
    """`str` of a pattern gives the text of the flow file."""
    assert str(parse_pattern(raw, int)) == raw


def test_a_pattern_is_described_with_the_values_of_its_captures() -> None:
    """A report has the value first, then the capture's name."""
    pattern = parse_pattern(["n1", "$a", "!= $b"], Nodes)
    assert pattern.describe({"a": "n2"}) == "[n1, n2 ($a), != $b]"
