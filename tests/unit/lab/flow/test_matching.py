"""Expectations against journals that the real core wrote."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.journal.records import Entry, NodeJoined
from nvrx_slurm.lab.flow.load import ClusterNeeds, load_flow
from nvrx_slurm.lab.flow.matching import LAG_S, FlowMatcher, Miss
from nvrx_slurm.lab.flow.model import AnyOrder, Count, Flow, Happens, Never
from nvrx_slurm.lab.flow.parsing import read_expectations
from nvrx_slurm.lab.flow.patterns import Bindings, Equals, EventPattern, Pattern, Trial
from nvrx_slurm.lab.flow.problems import Problems
from nvrx_slurm.report.words import event_name
from tests.unit.report.recorder import BEGIN, ended, to_first_cycle, with_one_recovery

Write = Callable[[str], Path]

KILL = "  - {when: {event: progress, rank: 4}, do: {kill_node: {of_rank: 4}}, as: $dead}\n"


def load(write: Write, *items: str, faults: str = "") -> Flow:
    """Expectations from line 3 on, one for each line unless an item has several."""
    expect = "".join(f"  - {item}\n" for item in items)
    return load_flow(write(f"job: job.yaml\nexpect:\n{expect}" + (f"faults:\n{faults}" if faults else "")))


def matcher(write: Write, *items: str, faults: str = "") -> FlowMatcher:
    return FlowMatcher(load(write, *items, faults=faults))


def feed(match: FlowMatcher, entries: Sequence[Entry]) -> FlowMatcher:
    for entry in entries:
        match.feed(entry)
    return match


def miss(match: FlowMatcher) -> Miss:
    assert match.miss is not None
    return match.miss


# ------------------------------------------------------------------------------------------ expectations that are met

MET: list[tuple[str, ...]] = [
    (
        "job_started",
        "rendezvous_closed: {cycle: 0}",
        "node_lost: {node: n2}",
        "rendezvous_closed: {cycle: 1}",
        "job_ended",
    ),
    (
        "rendezvous_closed: {cycle: 0, active: 4}",
        "rendezvous_closed: {standby: 1, promoted: [n4]}",
        "job_ended: {exit_code: 0}",
    ),
    (
        "node_lost: {node: $dead}",
        "rendezvous_closed: {promoted: [$spare]}",
        "workers_started: {node: $spare, cycle: 1}",
    ),
    ("node_lost: {cause: tether_lost}",),  # the name of older flows
    ("node_joined: {node: $a}", "node_joined: {node: '!= $a'}"),
    ("node_lost: {node: n2}", "recovered: {cycle: 1, phases: {decided: < 1s}}\n    within: 1s"),
    ("eventually: {job_ended: {exit_code: 0}}", "rendezvous_closed: {cycle: 0}", "rendezvous_closed: {cycle: 1}"),
    ("never: {worker_failed: {}}", "job_ended"),
    ("rendezvous_closed: {cycle: 1}", "never: {workers_started: {cycle: 0}}", "job_ended"),
    ("never: {workers_started: {cycle: 1}}\n    until: {node_lost: {node: n2}}", "job_ended"),
    ("count: {workers_started: {}}\n    is: 8", "job_ended"),
    ("count: {workers_started: {}}\n    is: 4\n    until: {node_lost: {}}", "job_ended"),
    ("rendezvous_closed: {cycle: 1}", "count: {workers_started: {}}\n    is: '>= 4'", "job_ended"),
    ("any_order: [workers_started: {node: n3}, workers_started: {node: n0}]", "node_lost"),
    (
        "rendezvous_closed: {cycle: 1}",
        "any_order: [[workers_started: {node: n4}, progress: {node: n4}], recovered: {cycle: 1}]",
        "job_ended",
    ),
    (
        "any_order: [workers_started: {node: $a}, workers_started: {node: $b}, workers_started: {node: n0}]",
        "job_ended",
    ),
    ("any_order: [eventually: {job_ended: {}}, never: {worker_hung: {}}]", "rendezvous_closed: {cycle: 1}"),
    ("any_order: [any_order: [node_joined: {node: n5}, node_joined: {node: n0}], rendezvous_opened]", "job_ended"),
]


@pytest.mark.parametrize("items", MET)
def test_what_a_journal_meets(write: Write, items: tuple[str, ...]) -> None:
    """A journal with all that is expected settles the flow, at the latest when the job is over."""
    match = feed(matcher(write, *items), ended().entries)
    match.job_over()
    assert match.miss is None
    assert match.settled


def test_captures_are_bound_in_passing(write: Write) -> None:
    """The values of captures can be read while the job runs."""
    items = ("node_lost: {node: $dead}", "rendezvous_closed: {nodes: [$a, $b, $new, $c], promoted: [$new]}")
    match = feed(matcher(write, *items), with_one_recovery().entries)
    assert match.bindings == {"dead": "n2", "a": "n0", "b": "n1", "new": "n4", "c": "n3"}


def test_an_entry_is_taken_by_one_branch_only(write: Write) -> None:
    """If several branches fit, one that need not bind a capture is taken first, then the first in the file."""
    branches = "any_order: [node_joined: {node: $a}, node_joined: {node: $b}, node_joined: {node: n0}]"
    match = feed(matcher(write, branches), to_first_cycle().entries)
    assert match.bindings == {"a": "n1", "b": "n2"}


def test_what_is_open_keeps_a_flow_going(write: Write) -> None:
    """A flow is settled as soon as nothing can fail any more, but not while a `never` or a count is open."""
    entries = ended().entries
    assert feed(matcher(write, "rendezvous_closed: {cycle: 1}"), entries[:25]).settled
    assert not feed(matcher(write, "rendezvous_closed: {cycle: 1}"), entries[:24]).settled
    assert not feed(matcher(write, "never: worker_hung", "rendezvous_closed: {cycle: 1}"), entries[:25]).settled
    ending = "never: worker_hung\n    until: {rendezvous_closed: {cycle: 1}}"
    assert feed(matcher(write, ending), entries[:25]).settled


# -------------------------------------------------------------------------------------- expectations that are not met

# items → the line, what was expected, why it is not met, the nearest entry and its difference
MISSED: list[tuple[tuple[str, ...], tuple[int, str, str, int | None, tuple[str, ...]]]] = [
    (
        ("rendezvous_closed: {cycle: 0}", "worker_failed: {rank: 2}", "job_ended"),
        (4, "worker_failed {rank: 2}", "the job ended, and it had not come", None, ()),
    ),
    (
        ("rendezvous_closed: {cycle: 2, active: 4}",),
        (
            3,
            "rendezvous_closed {cycle: 2, active: 4}",
            "the job ended, and it had not come",
            25,
            ("cycle: 1, not 2",),
        ),
    ),
    (
        ("node_lost: {node: $dead}", "rendezvous_closed: {promoted: [$dead], cycle: '> 0'}"),
        (
            4,
            "rendezvous_closed {promoted: [n2 ($dead)], cycle: > 0}",
            "the job ended, and it had not come",
            25,
            ("promoted: [n4], not [n2 ($dead)]",),
        ),
    ),
    (
        ("rendezvous_closed: {cycle: 1}", "node_lost: {node: n2}"),
        (
            4,
            "node_lost {node: n2}",
            "the job ended, and it had not come",
            18,
            ("it came, but before entry 25 (rendezvous_closed)",),
        ),
    ),
    (
        ("any_order: [node_joined: {node: n0}, node_joined: {node: n0}]",),
        (3, "node_joined {node: n0}", "the job ended, and it had not come", 3, ("it is what line 3 expected",)),
    ),
    (
        ("worker_hung: {replica: main-0, cycle: 1, node: n4}",),
        (
            3,
            "worker_hung {replica: main-0, cycle: 1, node: n4}",
            "the job ended, and it had not come",
            38,
            ("event: workers_done, not worker_hung",),
        ),
    ),
    (
        ("rendezvous_closed: {cycle: 0}", "node_lost: {node: n2}\n    within: 2s"),
        (
            4,
            "node_lost {node: n2} within 2s",
            "it did not come within 2s of entry 7 (rendezvous_closed)",
            18,
            ("it came, but too late",),
        ),
    ),
    (
        ("rendezvous_closed: {cycle: 0}\n    within: 30ms",),
        (
            3,
            "rendezvous_closed {cycle: 0} within 30ms",
            "it did not come within 30ms of the job's start",
            7,
            ("it came, but too late",),
        ),
    ),
    (
        ("never: {node_lost: {node: n2}}",),
        (3, "never node_lost {node: n2}", "entry 18 is what must not come", None, ()),
    ),
    (
        ("count: {rendezvous_closed: {}}\n    is: 1",),
        (3, "count of rendezvous_closed is 1", "with entry 25 it has come 2 times", None, ()),
    ),
    (
        ("count: {rendezvous_closed: {}}\n    is: < 2",),
        (3, "count of rendezvous_closed is < 2", "with entry 25 it has come 2 times", None, ()),
    ),
    (
        ("count: {rendezvous_closed: {cycle: 1}}\n    is: 2",),
        (
            3,
            "count of rendezvous_closed {cycle: 1} is 2",
            "the job ended, and it came 1 time",
            7,
            ("cycle: 0, not 1",),
        ),
    ),
    (
        ("count: {workers_started: {}}\n    is: '> 4'\n    until: {node_lost: {}}",),
        (3, "count of workers_started is > 4 until node_lost", "until entry 18 it came 4 times", None, ()),
    ),
    (
        ("eventually: {quarantined: {}}", "job_ended"),
        (3, "eventually quarantined", "the job ended, and it had not come", None, ()),
    ),
]


@pytest.mark.parametrize(("items", "expected"), MISSED, ids=[" ".join(items) for items, _ in MISSED])
def test_the_first_expectation_that_is_not_met(
    write: Write, items: tuple[str, ...], expected: tuple[int, str, str, int | None, tuple[str, ...]]
) -> None:
    """A miss has the expectation, the reason, and the nearest entry with its difference."""
    match = feed(matcher(write, *items), ended().entries)
    match.job_over()
    found = miss(match)
    nearest = found.nearest.entry.n if found.nearest else None
    differences = found.nearest.differences if found.nearest else ()
    assert (found.line, found.expected, found.reason, nearest, differences) == expected
    assert not match.settled


def test_a_miss_shows_the_entries_around_it(write: Write) -> None:
    """It has five entries before the decisive one, and five after it."""
    found = miss(feed(matcher(write, "never: {node_lost: {}}"), ended().entries))
    assert [entry.n for entry in found.around] == list(range(13, 24))


def test_the_entries_after_a_miss_are_shown_once_they_have_come(write: Write) -> None:
    """A miss is reported at once, and later has more entries."""
    entries = ended().entries
    match = feed(matcher(write, "never: {node_lost: {}}"), entries[:18])
    assert [entry.n for entry in miss(match).around] == list(range(13, 19))
    assert [entry.n for entry in miss(feed(match, entries[18:])).around] == list(range(13, 24))


# ------------------------------------------------------------------------------------------------------- times


def test_a_deadline_passes_in_silence(write: Write) -> None:
    """Without entries the deadline still passes, after a delay for entries on their way."""
    match = feed(
        matcher(write, "rendezvous_closed: {cycle: 0}", "node_lost: {}\n    within: 2s"), to_first_cycle().entries[:7]
    )
    due = match.next_deadline()
    assert due == pytest.approx(BEGIN + 0.05 + 2 + LAG_S)
    match.look(due)
    assert match.miss is None
    match.look(due + 0.001)
    assert miss(match).reason == "it did not come within 2s of entry 7 (rendezvous_closed)"
    assert match.next_deadline() is None


def test_within_counts_from_the_last_fault(write: Write) -> None:
    """The time starts with the fault, if that happened after the preceding entry."""
    items = (
        "rendezvous_closed: {cycle: 0}",
        "node_lost: {node: $dead}\n    within: 100ms",
        "rendezvous_opened: {}\n    within: 1s",
    )
    entries = ended().entries
    early, late = matcher(write, *items, faults=KILL), matcher(write, *items, faults=KILL)
    early.fault_happened(entries[17].t - 0.05, {"dead": "n2"})
    late.fault_happened(entries[17].t - 0.2, {"dead": "n2"})
    assert feed(early, entries).settled
    assert miss(feed(late, entries)).reason == "it did not come within 100ms of the last fault"
    assert miss(late).nearest is not None


@pytest.mark.parametrize(("after_s", "counts"), [(0.0013, True), (1.0, False)])
def test_within_allows_for_two_clocks(write: Write, after_s: float, counts: bool) -> None:
    """`within` counts from a fault although its recorded time is a millisecond after the loss that it caused."""
    match = matcher(write, "rendezvous_closed: {cycle: 0}", "node_lost: {node: $dead}\n    within: 1s", faults=KILL)
    lost = ended().entries[17]
    match.fault_happened(lost.t + after_s, {"dead": "n2"})
    assert feed(match, ended().entries).settled is counts


def test_a_late_entry_is_reported_as_late(write: Write) -> None:
    """While faults are still to come no deadline passes, but a late entry is a miss."""
    items = ("rendezvous_closed: {cycle: 0}", "node_lost: {node: n2}\n    within: 1s")
    other = "  - {when: {event: recovered}, do: kill_store}\n"
    match = feed(matcher(write, *items, faults=other), ended().entries[:17])
    assert match.next_deadline() is None
    match.look(BEGIN + 3600)
    assert match.miss is None
    match.feed(ended().entries[17])
    assert miss(match).reason == "it came 4.90 s after entry 7 (rendezvous_closed), not within 1s"


def test_a_fault_may_be_reported_after_its_consequences(write: Write) -> None:
    """A fault and the entries that follow from it are reported separately: their order makes no difference."""
    items = (
        "rendezvous_closed: {cycle: 0}",
        "node_lost: {node: $dead}\n    within: 1s",
        "rendezvous_closed: {cycle: 1}",
    )
    entries = ended().entries
    flow = load(write, *items, faults=KILL)
    results = []
    for told_after in range(len(entries)):
        match = feed(FlowMatcher(flow), entries[:told_after])
        match.fault_happened(entries[17].t - 0.01, {"dead": "n2"})
        feed(match, entries[told_after:])
        results.append((match.miss, match.settled, match.bindings))
    assert results == [(None, True, {"dead": "n2"})] * len(entries)


def test_of_several_that_one_entry_excludes_the_first_is_the_finding(write: Write) -> None:
    """One entry breaks two lines of the file: the first line is the finding."""
    items = ("never: node_joined", "never: {node_joined: {node: n0}}", "job_ended")
    assert miss(feed(matcher(write, *items), ended().entries)).line == 3


# ---------------------------------------------------------------------------------------------------- captures


def test_a_capture_of_a_fault_is_bound_by_the_fault(write: Write) -> None:
    """A capture that a fault names is bound by the fault, not by the first entry that would fit."""
    match = matcher(write, "node_joined: {node: $dead}", "node_lost: {node: $dead}", faults=KILL)
    feed(match, ended().entries[:17])
    assert match.bindings == {}
    match.fault_happened(BEGIN + 3, {"dead": "n2"})
    assert feed(match, ended().entries[17:]).settled


def test_a_fault_that_never_happened_is_named_in_the_miss(write: Write) -> None:
    """A capture that only the fault can bind has no value until the fault has happened."""
    match = feed(matcher(write, "node_lost: {node: $dead}", faults=KILL), ended().entries)
    match.job_over()
    found = miss(match)
    assert found.reason == (
        "the job ended, and it had not come; $dead has no value yet: the fault that names it has not happened"
    )
    assert found.nearest is not None
    assert found.nearest.differences == ("node: n2, not $dead",)


def test_a_fault_to_come_keeps_a_flow_going(write: Write) -> None:
    """The flow is not over while a fault is still to come, even if all expectations are met."""
    match = feed(matcher(write, "rendezvous_closed: {cycle: 0}", faults=KILL), to_first_cycle().entries)
    assert not match.settled
    match.fault_happened(BEGIN + 1, {"dead": "n2"})
    assert match.settled


def test_a_never_about_the_node_of_a_fault(write: Write) -> None:
    """A `never` with the fault's node is judged when that node is known, also for earlier entries."""
    match = matcher(write, "rendezvous_closed: {cycle: 0}", "never: {workers_started: {node: $dead}}", faults=KILL)
    feed(match, to_first_cycle().entries)
    assert match.miss is None
    match.fault_happened(BEGIN + 1, {"dead": "n2"})
    assert miss(match).reason == "entry 12 is what must not come"


# ----------------------------------------------------------------------------------------------------- search


def flow_of(*items: object) -> Flow:
    """A flow that has only expectations."""
    return Flow("f", "", Path("f"), Path("j"), (), ("local",), 6, ClusterNeeds(), (), items, 120.0, {})  # type: ignore[arg-type]


def literal(entry: Entry) -> EventPattern:
    """A pattern of this entry alone: its event, with the fields that distinguish it."""
    names = ("node", "rank", "cycle", "replica", "exit_code")
    fields = ((name, getattr(entry.record, name, None)) for name in names)
    return EventPattern(entry.n, event_name(entry.record), tuple((n, Equals(v)) for n, v in fields if v is not None))


def is_met(expect: Sequence[object], entries: Sequence[Entry]) -> bool:
    match = feed(FlowMatcher(flow_of(*expect)), entries)
    match.job_over()
    return match.miss is None


JOURNAL = ended().entries
SOME_OF_IT = st.sets(st.integers(1, len(JOURNAL)), min_size=1, max_size=12).map(
    lambda numbers: [JOURNAL[number - 1] for number in sorted(numbers)]
)


@given(SOME_OF_IT)
def test_any_part_of_a_journal_is_met_by_it(part: list[Entry]) -> None:
    """A sequence of entries of the journal, in their order, is met; with the last one first it is not."""
    sequence = [Happens(entry.n, literal(entry)) for entry in part]
    assert is_met(sequence, JOURNAL)
    if len(part) > 1:
        assert not is_met([sequence[-1], *sequence[:-1]], JOURNAL)


@given(SOME_OF_IT, st.randoms(use_true_random=False))
def test_branches_are_met_in_any_order(part: list[Entry], order: random.Random) -> None:
    """Branches are met in any order in the file."""
    raw = [{event_name(e.record): {name: str(p) for name, p in literal(e).fields}} for e in part]
    order.shuffle(raw)
    problems = Problems("f", {})
    expect = read_expectations(problems, [{"any_order": raw}], ("expect",))
    assert problems.found == []
    assert is_met(expect, JOURNAL)


@given(SOME_OF_IT, st.lists(st.integers(0, len(JOURNAL)), max_size=20))
@settings(max_examples=50)
def test_what_is_unrelated_changes_nothing(part: list[Entry], places: list[int]) -> None:
    """A journal with unrelated entries among its own still meets a sequence, and fails a `never` of those entries."""
    stranger = NodeJoined(node="stranger", incarnation="s", seq=1, addr="a", port=1)
    longer = list(JOURNAL)
    for place in sorted(places, reverse=True):
        longer.insert(place, Entry(n=0, t=JOURNAL[max(0, place - 1)].t, record=stranger))
    numbered = [Entry(n=n, t=entry.t, record=entry.record) for n, entry in enumerate(longer, 1)]
    sequence = [Happens(entry.n, literal(entry)) for entry in part]
    pattern = EventPattern(99, "node_joined", (("node", Equals("stranger")),))
    assert is_met(sequence, numbered)
    assert is_met([Count(99, pattern, Equals(len(places))), *sequence], numbered)
    assert is_met([Never(99, pattern), *sequence], numbered) == (not places)


# ------------------------------------------------------------------------------------------------------ scale


class Counted(Pattern):
    """A pattern that counts how often it is compared."""

    def __init__(self, answer: bool) -> None:
        self.answer, self.asked = answer, 0

    def fits(self, value: object, trial: Trial) -> bool:
        self.asked += 1
        return self.answer

    def describe(self, known: Bindings) -> str:
        return "counted"


def joins(names: Sequence[str]) -> list[Entry]:
    records = (NodeJoined(node=name, incarnation="i", seq=1, addr="a", port=1) for name in names)
    return [Entry(n=n, t=BEGIN + n, record=record) for n, record in enumerate(records, 1)]


def test_a_long_journal_costs_no_more_for_each_entry() -> None:
    """The cost of an entry does not grow with the number of earlier ones: each open expectation looks at it once."""
    counted = Counted(answer=False)
    expected = Happens(1, EventPattern(1, "node_joined", (("addr", counted),)))
    feed(FlowMatcher(flow_of(expected)), joins(["n1"] * 2000))
    assert counted.asked == 2000


def test_many_branches_cost_no_more_for_each_entry() -> None:
    """An entry is compared only with the branch that names its node, out of a thousand."""
    counted, names = Counted(answer=True), [f"n{index}" for index in range(1000)]
    patterns = (EventPattern(1, "node_joined", (("node", Equals(name)), ("addr", counted))) for name in names)
    match = FlowMatcher(flow_of(AnyOrder(1, tuple((Happens(1, pattern, within_s=3600),) for pattern in patterns))))
    assert feed(match, joins(names[::-1])).settled
    assert counted.asked == 1000
