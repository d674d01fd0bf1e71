"""What is wrong with a flow although each of its keys is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.lab.flow.load import load_flow

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


def test_an_order_that_cannot_be_is_no_error_of_the_file(write: Write) -> None:
    """Such a flow loads; it ends at its time limit and shows what came near (test_matching)."""
    load_flow(write(text("shutdown", "rendezvous_opened")))
