"""Which port is asked next, and for how long a sick one is left alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.transport.retrying import (
    GROWTH,
    HURRIED_S,
    JITTER,
    LONGEST_S,
    QUARANTINE_S,
    WELL,
    PortHealth,
    choose,
    failed,
    hurried,
)

NOW = 1000.0
PORTS = ("tcp://n1:1", "tcp://n1:2", "ucxx://n1:3", "tcp://n1:4")
A, B, C, D = PORTS
SICK, SICKER = PortHealth(1, NOW + 10), PortHealth(2, NOW + 60)

moments = st.floats(0, 4000)
healths = st.dictionaries(st.sampled_from(PORTS), st.builds(PortHealth, st.integers(1, 40), moments))
tiers_of_ports = st.lists(st.lists(st.sampled_from(PORTS), unique=True, max_size=4), max_size=3)
dice = st.floats(0, 1)


@pytest.mark.parametrize(
    ("tiers", "health", "turn", "tried", "expected"),
    [
        pytest.param([[A, B]], {}, 0, [], A, id="the first of the healthy"),
        pytest.param([[A, B]], {}, 1, [], B, id="the next at the next turn"),
        pytest.param([[A, B]], {}, 2, [], A, id="and round again"),
        pytest.param([[A, B]], {}, 0, [A], B, id="not the one that was tried"),
        pytest.param([[A, B]], {A: SICK}, 0, [], B, id="not the sick one"),
        pytest.param([[A, B]], {A: SICK}, 1, [], B, id="not the sick one, at any turn"),
        pytest.param([[A], [B]], {}, 5, [], A, id="the preferred transport"),
        pytest.param([[A], [B]], {A: SICK}, 0, [], B, id="another transport before a sick port"),
        pytest.param([[], [B]], {}, 0, [], B, id="a transport without ports is skipped"),
        pytest.param([[A, B]], {A: SICK, B: SICKER}, 0, [], A, id="with none healthy, the first to recover"),
        pytest.param([[B], [A]], {A: SICK, B: SICKER}, 0, [], A, id="of all transports"),
        pytest.param([[A, B]], {A: SICK, B: SICKER}, 0, [A], None, id="and no other in the same call"),
        pytest.param([[A, B]], {A: SICK}, 0, [B], None, id="no sick one, once a healthy one was tried"),
        pytest.param([[A]], {A: PortHealth(7, NOW)}, 0, [], A, id="healthy at the very end of its quarantine"),
        pytest.param([[A]], {}, 0, [A], None, id="none when all were tried"),
        pytest.param([], {}, 0, [], None, id="none of none"),
    ],
)
def test_the_table_of_choices(
    tiers: list[list[str]], health: dict[str, PortHealth], turn: int, tried: list[str], expected: str | None
) -> None:
    """Healthy ports come before sick ones, the preferred transport before others, untried before tried, in turn."""
    assert choose(tiers, health, now=NOW, turn=turn, tried=tried) == expected


@given(
    tiers=tiers_of_ports,
    health=healths,
    now=moments,
    turn=st.integers(0, 1 << 20),
    tried=st.sets(st.sampled_from(PORTS)),
)
def test_no_healthy_port_is_passed_over_for_a_sick_one(
    tiers: list[list[str]], health: dict[str, PortHealth], now: float, turn: int, tried: set[str]
) -> None:
    """While an untried port is healthy no sick one is asked; a call that has asked no port yet asks one."""
    chosen = choose(tiers, health, now=now, turn=turn, tried=tried)
    ports = {port for tier in tiers for port in tier}
    well = {port for port in ports - tried if not health.get(port, WELL).is_sick(now)}
    allowed = well or (set() if tried else ports)
    assert chosen in allowed if allowed else chosen is None


@given(health=healths, now=moments, turn=st.integers(0, 99))
def test_a_call_asks_each_healthy_port_once(health: dict[str, PortHealth], now: float, turn: int) -> None:
    """As many choices as there are healthy ports give each of them once; if none is healthy, one port is asked."""
    asked: list[str] = []
    while (port := choose([PORTS], health, now=now, turn=turn + len(asked), tried=asked)) is not None:
        asked.append(port)
    well = [port for port in PORTS if not health.get(port, WELL).is_sick(now)]
    assert sorted(asked) == sorted(well) if well else len(asked) == 1


@given(sick=st.sets(st.sampled_from(PORTS), max_size=3), first=st.integers(0, 1 << 16), rounds=st.integers(1, 8))
def test_rotation_is_fair(sick: set[str], first: int, rounds: int) -> None:
    """Over whole rounds all healthy ports are asked equally often, whichever turn is first."""
    health = dict.fromkeys(sick, SICK)
    well = len(PORTS) - len(sick)
    asked = Counter(choose([PORTS], health, now=NOW, turn=turn) for turn in range(first, first + rounds * well))
    assert asked == {port: rounds for port in PORTS if port not in sick}


@given(rolls=st.lists(dice, min_size=40, max_size=80))
def test_no_port_starves_where_all_are_sick(rolls: list[float]) -> None:
    """Each port always fails, and each is asked again and again: none waits for ever behind another."""
    health: dict[str, PortHealth] = {}
    asked: Counter[str] = Counter()
    for roll in rolls:
        port = choose([PORTS], health, now=NOW, turn=0)
        assert port is not None
        health[port] = failed(health.get(port, WELL), now=NOW, dice=roll)
        asked[port] += 1
    assert min(asked[port] for port in PORTS) >= len(rolls) // len(PORTS) // 4


@pytest.mark.parametrize(
    ("before", "lasts_s"),
    [(0, 30.0), (1, 60.0), (2, 120.0), (3, 240.0), (4, 480.0), (5, LONGEST_S), (6, LONGEST_S), (10_000, LONGEST_S)],
)
def test_a_quarantine_grows_with_each_failure(before: int, lasts_s: float) -> None:
    """It lasts 30 s, then twice as long each time, 10 minutes at most."""
    assert failed(PortHealth(before, 0.0), now=NOW, dice=0.5) == PortHealth(before + 1, NOW + lasts_s)


@given(failures=st.integers(0, 1 << 20), roll=dice, now=moments)
def test_the_jitter_is_bounded(failures: int, roll: float, now: float) -> None:
    """It makes a quarantine longer or shorter by a fifth at most, and never makes it end in the past."""
    lasts_s = failed(PortHealth(failures, 0.0), now=now, dice=roll).sick_until - now
    plain_s = min(QUARANTINE_S * GROWTH ** min(failures, 32), LONGEST_S)
    assert plain_s * (1 - JITTER) - 1e-6 <= lasts_s <= plain_s * (1 + JITTER) + 1e-6


def test_the_dice_decide() -> None:
    """Two clients that saw the same fault ask again at different times."""
    early, late = (failed(WELL, now=NOW, dice=roll).sick_until for roll in (0.0, 1.0))
    assert late - early == pytest.approx(2 * JITTER * QUARANTINE_S)


def test_a_port_that_was_hurried_is_put_behind_the_others_for_a_moment() -> None:
    """This is no failure: its next quarantine is not longer, and a current one is not made shorter."""
    assert hurried(WELL, now=NOW) == PortHealth(0, NOW + HURRIED_S)
    assert hurried(SICKER, now=NOW) == SICKER
    assert failed(hurried(WELL, now=NOW), now=NOW, dice=0.5) == PortHealth(1, NOW + QUARANTINE_S)
    assert choose([[A, B]], {A: hurried(WELL, now=NOW)}, now=NOW, turn=0) == B


def test_a_port_without_failures_is_asked() -> None:
    """Its first quarantine is the shortest one, and each failure in a row counts."""
    sick = failed(failed(WELL, now=NOW, dice=0.5), now=NOW, dice=0.5)
    assert sick.failures == 2
    assert failed(WELL, now=NOW, dice=0.5) == PortHealth(1, NOW + QUARANTINE_S)
    assert choose([[A]], {A: WELL}, now=NOW, turn=0) == A


def test_a_port_that_gets_well_while_it_is_looked_at() -> None:
    """Another thread removes the quarantine during the choice: this is no error, and a port is chosen."""

    class Recovering(dict[str, PortHealth]):
        def get(self, port: str, default: PortHealth) -> PortHealth:  # type: ignore[override]  # as it is used
            return self.pop(port, default)

    sick = Recovering({"a": PortHealth(1, 100.0), "b": PortHealth(1, 100.0)})
    assert choose([["a", "b"]], sick, now=0.0, turn=0) in ("a", "b")
