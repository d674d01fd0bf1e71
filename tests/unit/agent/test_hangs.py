"""Which workers hang, and when to check again: no hang is reported early, masked by another, or missed by the
timer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nvrx_slurm.agent.hangs import (
    STEP,
    Hang,
    Watched,
    judge,
    learned,
    merge,
    next_look,
    seen_by,
)
from nvrx_slurm.jobspec.model import HangSpec
from nvrx_slurm.workload.slot import OpenSection, Reading, Slot

NS = 1_000_000_000
BORN = 5_000 * NS


def at(seconds: float) -> int:
    """A moment, in seconds after the worker's start."""
    return BORN + round(seconds * NS)


def worker(rank: int = 0, *, beaten: float | None = None, step: int = 41, **told: object) -> Watched:
    """A worker whose last sign of progress was at `beaten`; `told` sets further fields of its reading or of
    `Watched`."""
    signs = {} if beaten is None else {"step": step, "beats": 3, "sign_ns": at(beaten)}
    mine = {key: value for key, value in told.items() if key in Reading._fields}
    rest = {key: value for key, value in told.items() if key not in mine}
    return Watched(rank, BORN, Reading(**signs | mine), **rest)  # type: ignore[arg-type]


def in_sections(*sections: tuple[str, float, float | None], beaten: float = 0.0) -> Watched:
    """A worker with these main-thread sections open: name, start, and timeout."""
    opened = tuple(OpenSection(name, at(since), timeout_s) for name, since, timeout_s in sections)
    return worker(beaten=beaten, open=opened, in_section=bool(opened))


STEP_600 = HangSpec(step_timeout=600)
EVERY_KIND: list[tuple[str, list[Watched], HangSpec, float, Hang]] = [
    (
        "step",
        [worker(beaten=100)],
        STEP_600,
        712,
        Hang(0, "no step for 612 s (limit 600 s) after step 41", 612, 600, step=41),
    ),
    (
        "section",
        [in_sections(("checkpoint", 100, 600))],
        HangSpec(),
        705,
        Hang(0, 'section "checkpoint" open for 605 s (limit 600 s)', 605, 600, 41),
    ),
    (
        "startup",
        [worker()],
        HangSpec(startup_timeout=1800),
        1800,
        Hang(0, "no first step 1,800 s after its start", 1800, 1800),
    ),
    (
        "output",
        [worker(last_output_ns=at(10))],
        HangSpec(no_output=1800),
        1810,
        Hang(0, "no output for 1,800 s", 1800, 1800),
    ),
    (
        "skew",
        [worker(rank=0, ended_ok_ns=at(50)), worker(rank=1), worker(rank=2, ended_ok_ns=at(60))],
        HangSpec(exit_skew=600),
        650,
        Hang(1, "rank 0 ended with exit code 0 600 s ago and this one still runs", 600, 600),
    ),
]
KINDS = [case[0] for case in EVERY_KIND]


@pytest.mark.parametrize(("workers", "limits", "now_s", "hang"), [case[1:] for case in EVERY_KIND], ids=KINDS)
def test_each_kind_of_hang_says_why(workers: list[Watched], limits: HangSpec, now_s: float, hang: Hang) -> None:
    """Each kind of hang has a sentence with its duration and its limit, and the record has both as numbers."""
    assert judge(workers, limits, {}, at(now_s)) == [hang]


@pytest.mark.parametrize(("workers", "limits", "now_s", "hang"), [case[1:] for case in EVERY_KIND], ids=KINDS)
def test_no_kind_of_hang_is_early_or_late(workers: list[Watched], limits: HangSpec, now_s: float, hang: Hang) -> None:
    """A nanosecond before its deadline no hang is reported; at the moment that `next_look` returns, it is."""
    moment = at(now_s) - round((hang.since_s - hang.limit_s) * NS)
    assert judge(workers, limits, {}, moment - 1) == []
    assert next_look(workers, limits, {}, moment - 1) == moment
    assert [found.rank for found in judge(workers, limits, {}, moment)] == [hang.rank]
    assert next_look(workers, limits, {}, moment) is None


def test_without_limits_no_worker_hangs() -> None:
    """Every limit is opt-in: without any, a worker that is silent for a year is not reported, and no timer is set."""
    workers = [worker(), worker(1, beaten=0), in_sections(("x", 0, None)), worker(2, ended_ok_ns=at(0))]
    year = at(365 * 86400)
    assert judge(workers, HangSpec(), {}, year) == []
    assert next_look(workers, HangSpec(), {}, at(0)) is None


def test_an_expired_outer_section_is_not_masked_by_an_inner_one() -> None:
    """Of two nested sections, the one whose deadline passed first is reported, whether it is the outer or the inner
    one."""
    outer_first = in_sections(("outer", 0, 100), ("inner", 90, 600))
    inner_first = in_sections(("outer", 0, 1000), ("inner", 90, 60))
    assert ["outer" in hang.why for hang in judge([outer_first], STEP_600, {}, at(101))] == [True]
    assert ["inner" in hang.why for hang in judge([inner_first], STEP_600, {}, at(160))] == [True]


def test_a_main_thread_section_stops_the_clock_of_steps() -> None:
    """While a main-thread section without a timeout is open, steps have no deadline, even if the slot had no entry
    for it."""
    assert judge([in_sections(("eval", 10, None))], STEP_600, {}, at(90_000)) == []
    assert judge([worker(beaten=0, in_section=True)], STEP_600, {}, at(90_000)) == []


def test_a_section_of_another_thread_does_not_mask_a_hung_main_loop() -> None:
    """While another thread writes a checkpoint, a main loop without steps still counts as hung."""
    saving = OpenSection("checkpoint", at(5), 3600, main_thread=False)
    (hang,) = judge([worker(beaten=0, open=(saving,))], STEP_600, {}, at(700))
    assert "no step for 700 s" in hang.why


def test_a_worker_that_never_beat_is_not_watched_by_steps() -> None:
    """A script that does not use this package may run for days under a step timeout."""
    assert judge([worker()], STEP_600, {STEP: 30.0}, at(90_000)) == []


def test_a_first_beat_ends_the_startup_limit() -> None:
    """After the first beat the startup timeout no longer applies, only the step timeout."""
    limits = HangSpec(startup_timeout=60, step_timeout=None)
    assert judge([worker(beaten=59)], limits, {}, at(90_000)) == []


def test_learned_deadlines_stand_in_where_none_is_set() -> None:
    """Where no limit is set, the learned one applies to steps and sections, and the sentence says that it was
    learned."""
    known = {STEP: 50.0, "save": 40.0}
    (step,) = judge([worker(beaten=0)], HangSpec(), known, at(50))
    (save,) = judge([in_sections(("save", 0, None))], HangSpec(), known, at(45))
    assert step.why == "no step for 50 s (learned limit 50 s) after step 41"
    assert save.why == 'section "save" open for 45 s (learned limit 40 s)'


def test_deadlines_that_were_given_win_over_learned_ones() -> None:
    """A limit that the user set wins over a learned one, whether it is shorter or longer."""
    for given_s in (10.0, 500.0):
        workers = [worker(beaten=0), replace(in_sections(("save", 0, given_s)), rank=1)]
        hangs = judge(workers, HangSpec(step_timeout=given_s), {STEP: 50.0, "save": 50.0}, at(600))
        assert [hang.limit_s for hang in hangs] == [given_s, given_s]


@pytest.mark.parametrize(
    "torn",
    [
        Reading(step=1, beats=1, sign_ns=0),
        Reading(step=1, beats=1, sign_ns=BORN - 1),
        Reading(step=1, beats=1, sign_ns=at(10**6)),
        Reading(step=1, beats=1, sign_ns=-(2**63)),
        Reading(step=1, beats=1, sign_ns=at(9_999), open=(OpenSection("x", BORN - 1, 1.0, False),)),
        Reading(step=1, beats=1, sign_ns=at(9_999), open=(OpenSection("x", at(10**6), 1.0, False),)),
    ],
)
def test_a_reading_that_cannot_be_gives_no_hang(torn: Reading) -> None:
    """A sign of progress or a section dated before the worker's start, or in the future, is never a hang."""
    assert judge([Watched(0, BORN, torn)], STEP_600, {}, at(10_000)) == []


def test_a_worker_that_has_ended_does_not_hang() -> None:
    """A worker that has ended is never reported, even if its last reading has an expired section."""
    ended = replace(in_sections(("x", 0, 1.0)), ended_ok_ns=at(5))
    assert judge([ended], HangSpec(startup_timeout=1, step_timeout=1, no_output=1, exit_skew=1), {}, at(90_000)) == []


def test_braces_in_a_name_are_just_that() -> None:
    """A section's name is never interpreted as a format string."""
    (hang,) = judge([in_sections(("{0} %s", 0, 1.5))], HangSpec(), {}, at(2))
    assert hang.why == 'section "{0} %s" open for 2 s (limit 1.5 s)'


STUCK = """
import signal
from nvrx_slurm.workload import beat, section
beat(step=41)
with section("checkpoint", timeout="10m"), section("write", timeout="1h"):
    print("stuck", flush=True)
    signal.pause()
"""


def test_a_real_worker_that_is_stuck_in_a_section_is_found(tmp_path: Path) -> None:
    """A hang is found from the worker's slot alone, even if the worker was stopped or killed, and not before the
    section's ten minutes are over."""
    slot, started_ns = Slot.create(tmp_path / "slot"), time.monotonic_ns()
    environment = os.environ | {"NVRX_BEAT_FILE": str(tmp_path / "slot")}
    with subprocess.Popen([sys.executable, "-c", STUCK], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"stuck\n"
        process.send_signal(signal.SIGSTOP)
        workers = [Watched(0, started_ns, slot.read())]
        process.kill()
    moment = next_look(workers, STEP_600, {}, time.monotonic_ns())
    assert moment is not None
    assert judge(workers, STEP_600, {}, moment - 1) == []
    (hang,) = judge(workers, STEP_600, {}, moment)
    assert hang.why == 'section "checkpoint" open for 600 s (limit 600 s)'
    assert hang.step == 41


# ------------------------------------------------------------------------------------------- restarts in process


EVERYTHING = HangSpec(startup_timeout=100, step_timeout=10, no_output=50)


def restarted(after_s: float, *, beats_since: int = 0, **told: object) -> Watched:
    """A worker with three beats whose last restart in process ended at `after_s`; `beats_since` of the beats came
    later."""
    place = {"restarted_ns": at(after_s), "beats_before": 3 - beats_since}
    return worker(beaten=after_s, **place, **told)


def test_while_a_restart_is_under_way_only_its_own_bound_counts() -> None:
    """During a restart in process the step, startup and output limits do not apply, only the restart's own limit as a
    main-thread section."""
    section = OpenSection("in-process restart", at(5), 300)
    busy = worker(beaten=0, restarting=True, beats_before=3, open=(section,), in_section=True, last_output_ns=at(0))
    assert judge([busy], EVERYTHING, {STEP: 1.0}, at(304)) == []
    (hang,) = judge([busy], EVERYTHING, {}, at(305))
    assert hang.why == 'section "in-process restart" open for 300 s (limit 300 s)'


def test_after_a_restart_the_worker_is_at_its_start_up_again() -> None:
    """After a restart in process the startup timeout applies until the first beat, since the worker may load a
    checkpoint; then the step timeout does."""
    again = restarted(1000, last_output_ns=at(1090))
    assert judge([again], EVERYTHING, {STEP: 1.0}, at(1099)) == []
    (hang,) = judge([again], EVERYTHING, {}, at(1100))
    assert hang.why == "no first step 100 s after its restart in process"
    (hang,) = judge([restarted(1000, beats_since=1, last_output_ns=at(1000))], EVERYTHING, {}, at(1010))
    assert hang.why == "no step for 10 s (limit 10 s) after step 41"


def test_a_restart_is_a_sign_of_life_for_those_who_print_nothing() -> None:
    """The output limit of a worker that prints nothing starts again at the end of a restart in process."""
    quiet = restarted(1000, last_output_ns=at(990))
    limits = HangSpec(no_output=50)
    assert judge([quiet], limits, {}, at(1049)) == []
    assert [hang.rank for hang in judge([quiet], limits, {}, at(1050))] == [0]


# ------------------------------------------------------------------------------------------- learning


def test_a_deadline_is_learned_after_the_warm_up() -> None:
    """A learned limit is the largest duration times the factor, but at least the minimum; below the warm-up count, or
    unless learning is on, there is none."""
    seen = {STEP: (50, 20.0), "save": (50, 1.0), "rare": (49, 900.0), "…": (900, 5.0)}
    limits = HangSpec(learn=True, safety_factor=4.0, warmup=50)
    assert learned(seen, limits) == {STEP: 80.0, "save": 30.0}
    assert learned(seen, msgspec.structs.replace(limits, learn=False)) == {}


def test_workers_side_by_side_know_no_more_than_one() -> None:
    """Workers that run side by side count each step once, with the longest gap of any of them."""
    readings = [
        Reading(step=9, beats=11, sign_ns=1, largest_gap_ns=NS * gap_s, seen={"save": (2, 7.0 - gap_s)})
        for gap_s in (1, 3, 2)
    ]
    assert seen_by([*readings, Reading(), Reading(step=0, beats=1)]) == {STEP: (10, 3.0), "save": (2, 6.0)}


SEEN = st.dictionaries(
    st.sampled_from([STEP, "a", "b"]), st.tuples(st.integers(0, 99), st.floats(0, 1e6, allow_nan=False))
)


@given(SEEN, SEEN, SEEN)
def test_cycles_add_up_in_any_grouping(one: dict, two: dict, three: dict) -> None:
    """Counts add up and durations take the maximum, so the order in which cycles are merged does not matter."""
    assert merge(merge(one, two), three) == merge(one, merge(two, three)) == merge(merge(three, one), two)
    for name, (count, largest_s) in merge(one, two).items():
        each = [seen[name] for seen in (one, two) if name in seen]
        assert (count, largest_s) == (sum(c for c, _ in each), max(s for _, s in each))


# --------------------------------------------------------------------------------------------- search

SECONDS = st.integers(-50, 1_000)
LIMIT = st.none() | st.integers(1, 500)
SECTION = st.builds(
    lambda name, since, timeout, main: OpenSection(name, at(since), timeout, main),
    st.sampled_from("ab"),
    SECONDS,
    LIMIT,
    st.booleans(),
)


@st.composite
def readings(draw: st.DrawFn) -> Reading:
    beats = draw(st.integers(0, 3))
    sections = tuple(draw(st.lists(SECTION, max_size=3)))
    return Reading(
        step=7 if beats else None,
        beats=beats,
        sign_ns=at(draw(SECONDS)),
        open=sections,
        in_section=any(section.main_thread for section in sections) or draw(st.booleans()),
    )


MOMENT = st.none() | SECONDS.map(at)
WORKERS = st.lists(
    st.builds(Watched, st.integers(0, 9), st.just(BORN), readings(), MOMENT, MOMENT),
    max_size=4,
    unique_by=lambda one: one.rank,
)
LIMITS = st.builds(HangSpec, startup_timeout=LIMIT, step_timeout=LIMIT, no_output=LIMIT, exit_skew=LIMIT)
LEARNED = st.dictionaries(st.sampled_from([STEP, "a", "b"]), st.integers(1, 500))


@given(WORKERS, LIMITS, LEARNED, SECONDS.map(at))
def test_the_timer_misses_no_hang_and_never_fires_without_one(
    workers: list[Watched], limits: HangSpec, known: dict[str, float], now_ns: int
) -> None:
    """Without new readings, the hung ranks first change at the moment that `next_look` returns; a deadline passes at
    that moment, and a rank that hangs goes on hanging."""
    ranks = {hang.rank for hang in judge(workers, limits, known, now_ns)}
    moment = next_look(workers, limits, known, now_ns)
    if moment is None:
        assert {hang.rank for hang in judge(workers, limits, known, now_ns + 10**18)} == ranks
        return
    assert moment > now_ns
    assert {hang.rank for hang in judge(workers, limits, known, moment - 1)} == ranks
    assert {hang.rank for hang in judge(workers, limits, known, moment)} >= ranks
    assert judge(workers, limits, known, moment)


@given(WORKERS, LIMITS, LEARNED, SECONDS.map(at))
def test_no_hang_is_early(workers: list[Watched], limits: HangSpec, known: dict[str, float], now_ns: int) -> None:
    """Every reported hang has lasted at least its limit; each running rank is reported at most once, in order."""
    hangs = judge(workers, limits, known, now_ns)
    running = {one.rank for one in workers if one.ended_ok_ns is None}
    assert [hang.rank for hang in hangs] == sorted({hang.rank for hang in hangs} & running)
    for hang in hangs:
        assert hang.since_s >= hang.limit_s > 0


@given(WORKERS, LIMITS, LEARNED, SECONDS.map(at), SECTION)
def test_one_more_open_section_of_another_thread_masks_nothing(
    workers: list[Watched], limits: HangSpec, known: dict[str, float], now_ns: int, extra: OpenSection
) -> None:
    """An additional section of another thread hides no hang."""
    more = [
        replace(one, reading=one.reading._replace(open=(*one.reading.open, extra._replace(main_thread=False))))
        for one in workers
    ]
    before = {hang.rank for hang in judge(workers, limits, known, now_ns)}
    assert before <= {hang.rank for hang in judge(more, limits, known, now_ns)}


@given(WORKERS, LIMITS, LEARNED, st.integers(0, 1_000))
def test_a_sign_of_progress_buys_time(
    workers: list[Watched], limits: HangSpec, known: dict[str, float], now_s: int
) -> None:
    """A worker that has just beaten, with no section open, is not hung for lack of a step."""
    now_ns = at(now_s)
    fresh = Reading(step=8, beats=4, sign_ns=now_ns)
    silent = HangSpec(startup_timeout=limits.startup_timeout, step_timeout=limits.step_timeout)
    running = [replace(one, reading=fresh, ended_ok_ns=None) for one in workers]
    assert judge(running, silent, known, now_ns) == []


def test_deadline_does_not_count_a_suspension():
    """A suspension of the whole job does not count towards a running deadline; an earlier suspension changes
    nothing."""
    limits, beaten = HangSpec(step_timeout=10.0), worker(beaten=5.0)
    suspended = [(at(2.0), 1 * NS), (at(107.0), 100 * NS)]
    assert judge([beaten], limits, {}, at(114.9), suspended) == []
    assert next_look([beaten], limits, {}, at(107.0), suspended) == at(115.0)
    assert [hang.rank for hang in judge([beaten], limits, {}, at(115.0), suspended)] == [0]
