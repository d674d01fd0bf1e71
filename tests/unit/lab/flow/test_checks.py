"""What is wrong with a flow although each of its keys is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.journal.records import Entry
from nvrx_slurm.lab.flow.language.checks import replicas
from nvrx_slurm.lab.flow.language.events import EventPattern
from nvrx_slurm.lab.flow.language.expected import AnyOrder, Expectation, Happens
from nvrx_slurm.lab.flow.language.load import load_flow
from nvrx_slurm.lab.flow.language.order import SPANS, impossible
from nvrx_slurm.lab.flow.language.patterns import Equals
from nvrx_slurm.report.words import event_name
from tests.unit.core.test_history import History

Write = Callable[[str], Path]

KILL = "  - {when: {state: running}, do: {kill_node: n1}, as: $dead}\n"


def text(*expect: str, faults: str = "", job: str = "job.yaml", head: str = "") -> str:
    items = "".join(f"  - {item}\n" for item in expect)
    below = f"faults:\n{faults}" if faults else ""
    return f"job: {job}\n{head}expect:\n{items}{below}"


def problem(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_flow(path)
    return str(caught.value)


# -------------------------------------------------------------------------------------------------- captures

# a file → the whole message
UNBOUND = {
    text("never: {node_lost: {node: $ded}}", faults=KILL): "flow.yaml:3: $ded: nothing binds it before `never "
    "node_lost {node: $ded}` needs it; valid: $dead",
    text("count: {node_lost: {node: $a}}\n    is: 1", "node_lost: {node: $a}"): "flow.yaml:3: $a: nothing binds it "
    "before `count of node_lost {node: $a} is 1` needs it",
    text("never: tick\n    until: {node_lost: {node: $a}}"): "flow.yaml:4: $a: nothing binds it before `never tick "
    "until node_lost {node: $a}` needs it",
    text("node_lost: {node: '!= $a'}", "node_joined: {node: $a}"): "flow.yaml:3: $a: nothing binds it before "
    "`node_lost {node: != $a}` needs it",
    text("tick", faults="  - {when: {state: running}, do: {kill_node: $x}}\n"): "flow.yaml:5: $x: nothing binds it "
    "before `kill_node $x` needs it",
    text("tick", faults="  - {when: {state: running}, do: {kill_node: $x}, as: $x}\n"): "flow.yaml:5: $x: nothing "
    "binds it before `kill_node $x` needs it",
    text("tick", faults="  - {when: {event: fence, node: '!= $x'}, do: kill_store}\n"): "flow.yaml:5: $x: nothing "
    "binds it before `fence {node: != $x}` needs it",
    text("tick", faults=KILL + KILL): "flow.yaml:6: $dead: fault 1 (line 5) binds it too",
}

BOUND = [
    text("never: {node_lost: {node: $dead}}", faults=KILL),
    text("node_joined: {node: $a}", "node_lost: {node: '!= $a'}", "never: {node_lost: {node: $a}}"),
    text("eventually: {node_joined: {node: $a}}", "never: {node_lost: {node: $a}}"),
    text("any_order: [[node_joined: {node: $a}], [never: {node_lost: {node: $a}}]]"),
    text("tick", faults="  - {when: {event: node_joined, node: $x}, do: {kill_node: $x}}\n"),
    text("node_joined: {node: $x}", faults="  - {when: {state: running}, do: {kill_node: $x}}\n"),
    text("tick", faults=f"{KILL}  - {{when: {{fault: 1}}, do: {{restore_node: $dead}}}}\n"),
]


@pytest.mark.parametrize(("flow", "message"), UNBOUND.items())
def test_a_capture_that_nothing_binds(write: Write, flow: str, message: str) -> None:
    """A capture that is compared with before anything can bind it is an error that names the nearest one."""
    assert problem(write(flow)) == message


@pytest.mark.parametrize("flow", BOUND)
def test_a_capture_that_something_binds(write: Write, flow: str) -> None:
    """Faults, triggers, and expectations before it may bind what an item compares with."""
    load_flow(write(flow))


# -------------------------------------------------------------------------------------------------- the order

# the items of `expect` → the message, after the line of the last
OUT_OF_ORDER = {
    (
        "job_ended",
        "round_opened",
    ): "`round_opened` can never come after `job_ended` (line 3): nothing comes after the "
    "end but the next generation's job_started",
    ("shutdown", "round_closed: {cycle: 1}"): "`round_closed {cycle: 1}` can never come after `shutdown` (line 3): a "
    "shutdown is final, and the first one wins",
    ("shutdown", "signalled: {reason: cancel}"): "`signalled {reason: cancel}` can never come after `shutdown` (line "
    "3): a shutdown is final, and the first one wins",
    ("round_closed: {cycle: 2}", "round_closed: {cycle: 1}"): "`round_closed {cycle: 1}` can never come after "
    "`round_closed {cycle: 2}` (line 3): cycle 1 is over by then",
    ("round_opened: {cycle: 1}", "worker_failed: {cycle: 0}"): "`worker_failed {cycle: 0}` can never come after "
    "`round_opened {cycle: 1}` (line 3): cycle 0 is over by then",
    ("workers_started: {cycle: 1}", "round_closed: {cycle: 1}"): "`round_closed {cycle: 1}` can never come after "
    "`workers_started {cycle: 1}` (line 3): in a cycle it comes first",
    ("recovered: {cycle: 1}", "workers_started: {cycle: 1}"): "`workers_started {cycle: 1}` can never come after "
    "`recovered {cycle: 1}` (line 3): in a cycle it comes first",
    ("job_started: {generation: 1}", "node_joined: {generation: 0}"): "`node_joined {generation: 0}` can never come "
    "after `job_started {generation: 1}` (line 3): generation 0 is over by then",
    (
        "any_order: [round_closed: {cycle: 1}, tick]",
        "round_closed: {cycle: 0}",
    ): "`round_closed {cycle: 0}` can never come after `round_closed {cycle: 1}` (line 3): cycle 0 is over by then",
    (
        "round_closed: {cycle: 1}",
        "eventually: {round_closed: {cycle: 0}}",
    ): "`round_closed {cycle: 0}` can never come after `round_closed {cycle: 1}` (line 3): cycle 0 is over by then",
}

IN_ORDER: list[tuple[str, ...]] = [
    ("job_ended", "job_started", "round_closed: {cycle: 0}"),
    ("job_ended", "round_closed: {cycle: 0, generation: 1}"),
    ("round_closed: {cycle: 1}", "round_closed: {cycle: 0, generation: 1}"),
    ("shutdown", "replica_ended", "node_left", "job_ended"),
    ("worker_failed: {cycle: 0}", "workers_started: {cycle: 0}"),
    ("progress: {cycle: 0}", "workers_started: {cycle: 0}"),
    ("any_order: [round_closed: {cycle: 1}, round_closed: {cycle: 0}]",),
    ("round_closed: {cycle: $c}", "round_closed: {cycle: 0}"),
    ("never: {round_closed: {cycle: 1}}", "round_closed: {cycle: 0}"),
]


@pytest.mark.parametrize(("items", "message"), OUT_OF_ORDER.items())
def test_an_order_that_cannot_be(write: Write, items: tuple[str, ...], message: str) -> None:
    """An item that can only come before one that stands ahead of it is an error that says why."""
    assert problem(write(text(*items))) == f"flow.yaml:{2 + len(items)}: {message}"


@pytest.mark.parametrize("items", IN_ORDER)
def test_an_order_that_can_be(write: Write, items: tuple[str, ...]) -> None:
    """What some job may do is not refused."""
    load_flow(write(text(*items)))


@pytest.mark.parametrize("job", ["job.yaml", "roles.yaml"])
def test_replicas_have_cycles_of_their_own(write: Write, job: str) -> None:
    """With several replicas a smaller cycle may follow a larger one, unless it is the same replica's."""
    items = ("round_closed: {cycle: 1}", "round_closed: {cycle: 0}")
    if job == "roles.yaml":
        load_flow(write(text(*items, job=job)))
        items = tuple(item.replace("{", "{replica: policy-0, ") for item in items)
    assert "cycle 0 is over by then" in problem(write(text(*items, job=job)))


ORDERING = (*SPANS, "shutdown", "signalled", "job_started", "job_ended")


def happened(entries: Sequence[Entry]) -> tuple[Happens, ...]:
    """A journal as the sequence of expectations that says all of it."""
    return tuple(
        Happens(entry.n, EventPattern(entry.n, event_name(entry.record), literals(entry))) for entry in entries
    )


def literals(entry: Entry) -> tuple[tuple[str, Equals], ...]:
    said = ((name, getattr(entry.record, name, None)) for name in ("replica", "cycle", "generation"))
    return tuple((name, Equals(value)) for name, value in said if value is not None)


class OrderOfHistories(History):
    """Whatever the core does, in whatever order things happen to it, is a possible order."""

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        items: tuple[Expectation, ...] = happened(
            [entry for entry in self.fleet.journal if event_name(entry.record) in ORDERING]
        )
        found = list(impossible(items, replicas(self.fleet.plan)))
        assert found == []
        assert list(impossible([AnyOrder(1, (items, items))], replicas(self.fleet.plan))) == []


OrderOfHistories.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestOrderOfHistories = OrderOfHistories.TestCase


# --------------------------------------------------------------------------------------------------- targets

# job, the fault's `do`, what the message says after `flow.yaml:5: `
BAD_TARGETS = [
    ("job.yaml", "{kill_worker: 8}", "kill_worker: the job has no rank 8: its last is 7"),
    ("job.yaml", "{kill_node: {of_rank: 8}}", "kill_node: the job has no rank 8: its last is 7"),
    (
        "job.yaml",
        "{kill_node: {spare: 3}}",
        "kill_node: the job has 2 hot spares, and no number 3; set `overrides: {spares: …}`",
    ),
    (
        "job.yaml",
        "{kill_worker: {rank: 0, replica: main}}",
        "kill_worker: the job has no replica main; valid: main-0",
    ),
    (
        "roles.yaml",
        "{kill_worker: 0}",
        "kill_worker: which replica's rank 0? Name one by `replica`: policy-0, rollout-0, rollout-1, rollout-2",
    ),
    (
        "roles.yaml",
        "{kill_worker: {rank: 2, replica: rollout-1}}",
        "kill_worker: the job has no rank 2: its last is 1",
    ),
    ("job.yaml", "fill_disk", "fill_disk: needs `cluster: {disk: 4m}`"),
    (
        "job.yaml",
        "kill_attribution_service",
        "kill_attribution_service: needs `cluster: {attribution: stop}`",
    ),
    ("job.yaml", "{cut_link: n1}", "cut_link: needs `cluster: {network: own}`"),
]


@pytest.mark.parametrize(("job", "do", "message"), BAD_TARGETS)
def test_a_target_that_the_job_does_not_have(write: Write, job: str, do: str, message: str) -> None:
    """A fault that could not strike is refused before anything is submitted."""
    fault = f"  - {{when: {{state: running}}, do: {do}}}\n"
    assert problem(write(text("tick", faults=fault, job=job))) == f"flow.yaml:5: {message}"


def test_a_replica_that_the_job_does_not_have(write: Write) -> None:
    """An event of a replica that the job does not have would never come."""
    expected = "flow.yaml:3: round_closed.replica: the job has no replica main; valid: main-0"
    assert problem(write(text("round_closed: {replica: main}"))) == expected
