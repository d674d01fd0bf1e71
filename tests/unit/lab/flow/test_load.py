"""Flow files: the model that they give, and the message for each mistake."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML

from nvrx_slurm.errors import EXIT_USAGE, ConfigError, UsageError
from nvrx_slurm.lab.flow.faults import FAULTS
from nvrx_slurm.lab.flow.load import ClusterNeeds, load_flow, load_flows
from nvrx_slurm.lab.flow.model import STAGES, Happens, OnEvent, OnSeveral
from nvrx_slurm.lab.flow.patterns import FIELDS
from nvrx_slurm.lab.flow.schema import flow_schema
from nvrx_slurm.lab.flow.stages import check as check_stage

Write = Callable[[str], Path]

SHIPPED = Path(__file__).parents[4] / "ci" / "flows"

WHOLE = """\
about: A killed node's ranks move to a hot spare.
job: job.yaml
overrides: {spares: 1, slurm.time: 2m, fault_tolerance: {max_restarts: 1}}
on: [dev, local]
cluster: {nodes: 6, settings: {KillWait: 10}, disk: 4m, network: own}
faults:
  - when:
      all:
        - {event: progress, rank: 2, step: 5}
        - {state: running, after: 1s}
    do: {kill_node: {of_rank: 2}}
    as: $dead
  - when: {fault: 1, after: 500ms}
    do: {slow_link: {node: $dead, delay: 200ms, loss: 10%}}
expect:
  - round_closed: {cycle: 0, active: ">= 4"}  # its name until 0.2
  - node_lost: {node: $dead}
    within: 1s
  - any_order:
      - workers_started: {node: n1}
      - - workers_started: {cycle: 1}
        - progress: {cycle: 1}
  - eventually: {recovered: {total_s: "< 2s"}}
    within: 5s
  - never: {workers_started: {node: $dead, cycle: 1}}
  - count: {restart_decided: {}}
    is: "<= 1"
    until: {shutdown: {}}
  - job_ended
limits: {wall: 90s}
"""

HEAD = "job: job.yaml\n"
END = "expect: [job_ended]\n"

# text of the file → the whole message
BAD_FILES = {
    END: "flow.yaml:1: job: is required",
    HEAD: "flow.yaml:1: expect: is required",
    HEAD + "expect: []": "flow.yaml:2: expect: must expect something, such as `job_ended: {exit_code: 0}`",
    HEAD + "expect: job_ended": "flow.yaml:2: expect: must be a list, not 'job_ended'",
    HEAD + END + "onn: dev": "flow.yaml:3: onn: is not known; did you mean `on`?",
    HEAD + END + "on: [dev, mars]": "flow.yaml:3: on.1: must be one of 'local', 'dev' or 'slurm', not 'mars'",
    HEAD + END + "on: []": "flow.yaml:3: on: names no stage; leave it out for all of local, dev, slurm",
    HEAD + END + "cluster: {disk: lots}": "flow.yaml:3: cluster.disk: 'lots' is no size; write it like 2GiB, 500MB",
    HEAD + END + "cluster: {network: fast}": "flow.yaml:3: cluster.network: must be 'own', not 'fast'",
    HEAD + END + "limits: {wall: soon}": "flow.yaml:3: limits.wall: 'soon' is no duration; write it like 15s, "
    "2m, 1h30m",
    HEAD + END + "name: a/b": "flow.yaml:3: name: must be 1 to 64 letters, digits, '.', '_' or '-', and start with a "
    "letter or digit",
    "job: jop.yaml\n" + END: "flow.yaml:1: job: there is no file jop.yaml; in that folder, nearest: job.yaml, "
    "flow.yaml, roles.yaml",
    HEAD + "overrides: {nodez: 3}\n" + END: "flow.yaml:2: nodez: is not known; did you mean `nodes`?",
    HEAD
    + "overrides:\n  slurm:\n    time: 5x\n"
    + END: "flow.yaml:4: slurm.time: '5x' is no duration; write it like 15s, 2m, 1h30m",
    HEAD
    + "overrides: {slurm.time: 2m, slurm: {time: 3m}}\n"
    + END: "flow.yaml:2: overrides.slurm.time: `slurm.time` is set twice; write it once, nested or dotted",
    HEAD + END + "cluster:\n  nodes: 5": "flow.yaml:4: cluster.nodes: the job asks for 6 nodes (2 hot spares "
    "included); a cluster of 5 cannot run it",
    "a: [": "flow.yaml:1: is not YAML: while parsing a flow node, expected the node content, but found "
    "'<stream end>'",
}

# item of `expect` → the message after `flow.yaml:3: `
BAD_ITEMS = {
    "worker_started: {}": "expect.0.worker_started: is no event of the journal; nearest: workers_started, "
    "controller_started, worker_failed, job_started, restart_asked, … (all are in docs/journal.md)",
    "rendezvous_closed: {cylce: 0}": "expect.0.rendezvous_closed.cylce: is no field of rendezvous_closed; nearest: "
    "cycle, active, "
    "world_size, nodes, replica, …",
    "tick: {node: n1}": "expect.0.tick.node: is no field of tick; it has none",
    "rendezvous_closed: {cycle: one}": "expect.0.rendezvous_closed.cycle: must be a whole number, not 'one'",
    "rendezvous_closed: {cycle: [1]}": "expect.0.rendezvous_closed.cycle: must be a whole number, not a list",
    "rendezvous_closed: {cycle: {a: 1}}": "expect.0.rendezvous_closed.cycle: must be a whole number, not a mapping",
    "rendezvous_closed: {cycle: null}": "expect.0.rendezvous_closed.cycle: is never null; it is a whole number",
    "rendezvous_closed: {promoted: n4}": "expect.0.rendezvous_closed.promoted: must be a list such as [a, b], or "
    "{contains: "
    "a}, or {length: 2}, not 'n4'",
    "rendezvous_closed: {nodes: {length: two}}": "expect.0.rendezvous_closed.nodes.length: must be a whole number, "
    "not 'two'",
    "attributed: {attribution: STOP}": "expect.0.attributed.attribution: must be a mapping of its fields, not 'STOP'",
    "attributed: {attribution: {verdict: HALT}}": "expect.0.attributed.attribution.verdict: must be one of RESTART, "
    "STOP, UNKNOWN, TIMEOUT, not 'HALT'",
    "attributed: {attribution: {verdit: STOP}}": "expect.0.attributed.attribution.verdit: is no field of it; "
    "nearest: verdict, hint, read, cached, settle, …",
    "rendezvous_closed: [cycle]": "expect.0.rendezvous_closed: must be a mapping such as `rendezvous_closed: "
    "{field: value}`, not "
    "['cycle']",
    "recovered: {total_s: '< 2x'}": "expect.0.recovered.total_s: must be a number, or a duration such as 500ms, not "
    "'2x'",
    "recovered: {phases: {closed: x}}": "expect.0.recovered.phases.closed: must be a number, or a duration such as "
    "500ms, not 'x'",
    "learned: {seen: {step: [1]}}": "expect.0.learned.seen.step: has 2 items, not 1",
    "workers_started: {pids: {a: 1}}": "expect.0.workers_started.pids.a: must be a whole number, not 'a'",
    "shutdown: {checkpoint: maybe}": "expect.0.shutdown.checkpoint: must be true or false, not 'maybe'",
    "worker_failed: {rank: 64}": "worker_failed.rank: the job has no rank 64: its last is 7",
    "replica_ended: {outcome: dome}": "expect.0.replica_ended.outcome: must be one of done, failed, not 'dome'; did "
    "you mean done?",
    "node_lost: {node: $1}": "expect.0.node_lost.node: '$1' is no capture: after `$` come letters, digits and '_', "
    "no digit first",
    "node_lost: {node: '> n1'}": "expect.0.node_lost.node: `>` compares numbers, and this is text",
    "rendezvous_closed: {cycle: '~ 3'}": "expect.0.rendezvous_closed.cycle: `~` searches in text, and this is a "
    "whole number",
    "node_lost: {cause: '~ ['}": "expect.0.node_lost.cause: `~ [` is no regular expression: unterminated character "
    "set at position 0",
    "{}": "expect.0: an item has one event, as `job_ended: {exit_code: 0}` has, not none",
    "[job_ended]": "expect.0: must be a mapping such as `job_ended: {exit_code: 0}`, not ['job_ended']",
    "{job_ended: {}, shutdown: {}}": "expect.0: an item has one event, as `job_ended: {exit_code: 0}` has, not "
    "`job_ended` and `shutdown`; write each as an item of its own",
    "{job_ended: {}, until: tick}": "expect.0.until: has no meaning beside `job_ended`; what may stand there: within",
    "{job_ended: {}, within: soon}": "expect.0.within: 'soon' is no duration; write it like 15s, 2m, 1h30m",
    "never: {tick: {}, fence: {}}": "expect.0.never: must have one key, as `never: {node_lost: {node: $dead}}` has, "
    "not 2",
    "count: job_ended": "expect.0.count: needs `is`: how often, such as `is: 3` or `is: '>= 2'`",
    "{count: job_ended, is: many}": "expect.0.is: must be a whole number, not 'many'",
    "{count: job_ended, is: $n}": "expect.0.is: must be a number such as 3, or a comparison such as '>= 2', not '$n'",
    "any_order: []": "expect.0.any_order: must be a list of items, or of lists of items",
    "any_order: [tick, []]": "expect.0.any_order.1: a branch without an item expects nothing",
    "node_lost: {node: '!= null'}": "expect.0.node_lost.node: is never null; it is text",
    "any_order: [[fense], tick]": "expect.0.any_order.0.0.fense: is no event of the journal; nearest: fence, "
    "learned, node_fenced, job_ended, agents_started, … (all are in docs/journal.md)",
}

STATE = "when: {state: running}"

# item of `faults` → the message after `flow.yaml:4: `
BAD_FAULTS = {
    "kill_node": "faults.0: must be a mapping such as `{when: {event: node_joined}, do: {kill_node: {of_rank: 2}}}`, "
    "not 'kill_node'",
    f"{{{STATE}}}": "faults.0: needs `do`, as in `do: {kill_node: {of_rank: 2}}`",
    "{do: kill_store}": "faults.0: needs `when`, as in `when: {event: node_joined}`",
    f"{{{STATE}, do: kill_store, after: 3s}}": "faults.0.after: has no meaning beside `do`; what may stand there: "
    "when, do, as",
    f"{{{STATE}, do: kill_nod}}": "faults.0.do.kill_nod: is no fault; nearest: kill_node, kill_agent, kill_store, "
    "kill_worker, kill_controller, … (all are in docs/flows.md)",
    f"{{{STATE}, do: {{kill_node: n1, kill_store: }}}}": "faults.0.do: must have one key, as `do: {kill_node: "
    "{of_rank: 2}}` has, not 2",
    f"{{{STATE}, do: kill_node}}": "faults.0.do.kill_node: takes exactly one of `node`, `of_rank`, `spare`, "
    "`batch_host`, not none",
    f"{{{STATE}, do: {{kill_node: {{node: n1, spare: 1}}}}}}": "faults.0.do.kill_node: takes exactly one of `node`, "
    "`of_rank`, `spare`, `batch_host`, not `node` and `spare`",
    f"{{{STATE}, do: {{kill_node: {{rank: 1}}}}}}": "faults.0.do.kill_node.rank: is not known; did you "
    "mean `of_rank`?",
    f"{{{STATE}, do: {{kill_node: {{spare: 1, replica: main-0}}}}}}": "faults.0.do.kill_node.replica: says whose "
    "rank is meant, and belongs to `of_rank`",
    f"{{{STATE}, do: {{kill_node: {{batch_host: false}}}}}}": "faults.0.do.kill_node.batch_host: must be true; leave "
    "it out to name another node",
    f"{{{STATE}, do: {{kill_node: $d-1}}}}": "faults.0.do.kill_node.node: '$d-1' is no capture: after `$` come "
    "letters, digits and '_', no digit first",
    f"{{{STATE}, do: {{kill_worker: one}}}}": "faults.0.do.kill_worker: must be a rank, such as 2, or a capture such "
    "as $rank, not 'one'",
    f"{{{STATE}, do: {{kill_store: 3}}}}": "faults.0.do.kill_store: takes no value such as '3'; leave it empty, or "
    "write a mapping of its arguments",
    f"{{{STATE}, do: {{kill_store: {{a: 3}}}}}}": "faults.0.do.kill_store.a: is not known; valid here: nothing",
    f"{{{STATE}, do: {{slow_link: n1}}}}": "faults.0.do.slow_link: needs `delay` (such as 200ms), `loss` (such as "
    "10%), or both",
    f"{{{STATE}, do: {{slow_link: {{node: n1, loss: 200%}}}}}}": "faults.0.do.slow_link.loss: must be a share such "
    "as 10%, up to 100%, not '200%'",
    f"{{{STATE}, do: shorten_time_limit}}": "faults.0.do.shorten_time_limit.to: is required",
    f"{{{STATE}, do: {{shorten_time_limit: soon}}}}": "faults.0.do.shorten_time_limit: 'soon' is no duration; "
    "write it like 15s, 2m, 1h30m",
    f"{{{STATE}, do: {{scancel: {{signal: FOO}}}}}}": "faults.0.do.scancel.signal: must be one of SIGKILL, SIGSTOP, "
    "SIGCONT, SIGTERM, SIGINT, SIGUSR1, SIGUSR2, SIGHUP, SIGQUIT, not 'FOO'",
    f"{{{STATE}, do: kill_store, as: $x}}": "faults.0.as: names the node or the rank that was hit, and kill_store "
    "hits none; nearest: kill_worker, kill_node, kill_supervisor, kill_agent, stop_worker, …",
    f"{{{STATE}, do: {{kill_node: n1}}, as: x}}": "faults.0.as: must be a capture such as $dead, not 'x'",
    "{when: running, do: kill_store}": "faults.0.when: must be a mapping such as `when: {event: node_joined}`, not "
    "'running'",
    "{when: {}, do: kill_store}": "faults.0.when: a trigger has one of event, state, fault, all, any, as in `when: "
    "{event: node_joined}`, not none",
    "{when: {state: ended, fault: 1}, do: kill_store}": "faults.0.when: a trigger has one of event, state, fault, "
    "all, any, as in `when: {event: node_joined}`, not `state` and `fault`",
    "{when: {state: runing}, do: kill_store}": "faults.0.when.state: 'runing' is no state; nearest: running, "
    "pending, recovering, shutting_down, ended",
    "{when: {state: running, after: x}, do: kill_store}": "faults.0.when.after: 'x' is no duration; write it like "
    "15s, 2m, 1h30m",
    "{when: {state: running, times: 2}, do: kill_store}": "faults.0.when.times: has no meaning beside `state`; what "
    "may stand there: after",
    "{when: {fault: 2}, do: kill_store}": "faults.0.when.fault: must be the number of a fault of this file, 1 to 1, "
    "not '2'",
    "{when: {event: fense}, do: kill_store}": "faults.0.when.event: is no event of the journal; nearest: fence, "
    "learned, node_fenced, job_ended, agents_started, … (all are in docs/journal.md)",
    "{when: {event: fence, nod: a}, do: kill_store}": "faults.0.when.nod: is no field of fence; nearest: node, "
    "incarnation",
    "{when: {event: fence, times: 0}, do: kill_store}": "faults.0.when.times: must be a whole number from 1, not '0'",
    "{when: {event: progress, times: 2}, do: kill_store}": "faults.0.when.times: cannot be counted of progress, "
    "which every heartbeat repeats; name its cycle or step",
    "{when: {event: progress, seq: 2}, do: kill_store}": "faults.0.when.seq: is not in heartbeats; nearest: step, "
    "node, cycle, replica, rank",
    "{when: {all: []}, do: kill_store}": "faults.0.when.all: must be a list of triggers",
    "{when: {any: [{state: end}]}, do: kill_store}": "faults.0.when.any.0.state: 'end' is no state; nearest: ended, "
    "pending, recovering, shutting_down, running",
}


def problem(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_flow(path)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value)


def test_a_file_whose_name_is_not_utf_8(write: Write) -> None:
    """It is refused before anything runs, since neither an attempt nor a report could name it."""
    file = write(HEAD + END)
    other = file.rename(file.with_name(os.fsdecode(b"fl\xffw.yaml")))
    assert "is not UTF-8" in problem(other).encode(errors="replace").decode()


def test_a_whole_file(write: Write) -> None:
    """The model has every kind of key, with its line."""
    flow = load_flow(write(WHOLE))
    assert (flow.name, flow.on, flow.wall_s) == ("flow", ("dev", "local"), 90.0)
    assert flow.overrides == (("spares", "1"), ("slurm.time", "2m"), ("fault_tolerance.max_restarts", "1"))
    assert flow.nodes == 6
    assert flow.cluster == ClusterNeeds(nodes=6, settings={"KillWait": "10"}, disk=4 << 20, network="own")
    kill, slow = flow.faults
    assert isinstance(kill.when, OnSeveral) and kill.when.needs_all
    assert (kill.line, kill.action, kill.arguments, kill.binds) == (7, "kill_node", {"of_rank": 2}, "dead")
    assert kill.describe() == "kill_node of rank 2"
    assert slow.arguments == {"node": "$dead", "delay": 0.2, "loss": 0.1}
    assert [item.line for item in flow.expect] == [16, 17, 19, 23, 25, 26, 29]
    assert [str(item) for item in flow.expect if not hasattr(item, "branches")] == [
        "rendezvous_closed {cycle: 0, active: >= 4}",
        "node_lost {node: $dead} within 1s",
        "eventually recovered {total_s: < 2} within 5s",
        "never workers_started {node: $dead, cycle: 1}",
        "count of restart_decided is <= 1 until shutdown",
        "job_ended",
    ]


def test_the_defaults_of_a_file(write: Write) -> None:
    """By default the name is the file's, all stages are allowed, and the job decides the number of nodes."""
    flow = load_flow(write(HEAD + END))
    assert (flow.name, flow.on, flow.nodes, flow.wall_s) == ("flow", STAGES, 6, 120.0)
    assert isinstance(flow.expect[0], Happens)


def test_a_step_of_a_trigger_is_that_or_a_later_one(write: Write) -> None:
    """Heartbeats skip steps, so a trigger's `step: 5` means at least 5."""
    flow = load_flow(write(f"{HEAD}{END}faults: [{{when: {{event: progress, rank: 2, step: 5}}, do: kill_store}}]"))
    when = flow.faults[0].when
    assert isinstance(when, OnEvent)
    assert str(when.pattern) == "progress {rank: 2, step: >= 5}"


@pytest.mark.parametrize(("text", "message"), BAD_FILES.items())
def test_bad_files(write: Write, text: str, message: str) -> None:
    """The message has the line of the wrong key, the value seen, and the valid values."""
    assert problem(write(text)) == message


@pytest.mark.parametrize(("item", "message"), BAD_ITEMS.items())
def test_bad_expectations(write: Write, item: str, message: str) -> None:
    """The message has the line of the wrong expectation, the value seen, and the valid values."""
    assert problem(write(f"{HEAD}expect:\n  - {item}\n")) == f"flow.yaml:3: {message}"


@pytest.mark.parametrize(("item", "message"), BAD_FAULTS.items())
def test_bad_faults(write: Write, item: str, message: str) -> None:
    """The message has the line of the wrong fault or trigger, the value seen, and the valid values."""
    assert problem(write(f"{HEAD}{END}faults:\n  - {item}\n")) == f"flow.yaml:4: {message}"


def test_all_problems_at_once(write: Write) -> None:
    """All problems of a file are in one message, in the order of their lines."""
    text = "job: jop.yaml\nabout: x\nonn: dev\nexpect:\n  - fense\n  - rendezvous_closed: {cycle: one, activ: 2}\n"
    lines = problem(write(text)).splitlines()
    assert lines[0] == "5 problems:"
    assert [line.split(": ")[0].strip() for line in lines[1:]] == [f"flow.yaml:{line}" for line in (1, 3, 5, 6, 6)]


def test_a_bad_job_names_its_own_line(write: Write) -> None:
    """The message for a mistake in job.yaml is that of `nvrx-slurm submit`."""
    flow = write(HEAD + END)
    Path("job.yaml").write_text("name: a\ncommand: x\nspares: -1\n")
    assert problem(flow) == "job.yaml:3: spares: must be at least 0, not '-1'"


# ------------------------------------------------------------------------------------------------ many files


def test_folders_files_and_globs(write: Write) -> None:
    """A folder means its *.yaml files in order; a glob selects by name."""
    flow = write(HEAD + END)
    folder = Path("flows")
    folder.mkdir()
    for name in ("b", "a"):
        (folder / f"{name}.yaml").write_text("job: ../job.yaml\n" + END)
    assert [each.name for each in load_flows([folder, flow, folder])] == ["a", "b", "flow"]
    assert [each.name for each in load_flows([folder, flow], ["f*", "b"])] == ["b", "flow"]


def test_no_flow_left(write: Write, tmp_path: Path) -> None:
    """A glob that matches nothing, and a folder without flows, are errors."""
    flow = write(HEAD + END)
    with pytest.raises(UsageError, match=r"^no flow is called fow; valid: flow$"):
        load_flows([flow], ["fl*", "fow"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"^empty: the folder holds no flow \(\*\.yaml\)$"):
        load_flows([Path("empty")])
    with pytest.raises(ConfigError, match=r"^none\.yaml: cannot be read: No such file or directory$"):
        load_flows([Path("none.yaml")])


def test_one_name_twice(write: Write) -> None:
    """Flows in two files cannot have the same name, because reports and artifacts would mix them up."""
    write(HEAD + END)
    Path("other.yaml").write_text("name: flow\n" + HEAD + END)
    with pytest.raises(ConfigError, match=r"^other\.yaml:1: name: flow is the name of flow\.yaml too; give one"):
        load_flows([Path("flow.yaml"), Path("other.yaml")])


def test_the_problems_of_all_files(write: Write) -> None:
    """The problems of several files are in one message."""
    write(HEAD + "expect: [fense]")
    Path("other.yaml").write_text("job: job.yaml\nexpect: []\n")
    with pytest.raises(ConfigError) as caught:
        load_flows([Path("flow.yaml"), Path("other.yaml")])
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == ["flow.yaml:2", "other.yaml:2"]


# ---------------------------------------------------------------------------------------------------- schema


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(flow_schema())


def test_every_flow_that_ships_fits_the_schema(validator: jsonschema.Draft202012Validator) -> None:
    """The JSON Schema is valid, and accepts each flow of the project."""
    validator.check_schema(validator.schema)
    for path in SHIPPED.glob("*.yaml"):
        validator.validate(YAML(typ="safe").load(path))


@pytest.mark.parametrize("item", ["round_closed", "{round_opened: {cycle: 0}}", "{never: round_closed}"])
def test_the_schema_has_the_names_of_older_flows(validator: jsonschema.Draft202012Validator, item: str) -> None:
    """An editor does not mark a name that the parser accepts."""
    trigger = "{when: {event: round_closed, cycle: 0}, do: requeue}"
    assert validator.is_valid(YAML(typ="safe").load(f"{HEAD}expect: [{item}]\nfaults: [{trigger}]"))


@pytest.mark.parametrize("item", ["fense", "{fense: {}}", "{rendezvous_closed: {cylce: 0}}", "{never: {fense: {}}}"])
def test_the_schema_refuses_what_the_journal_does_not_have(
    validator: jsonschema.Draft202012Validator, item: str
) -> None:
    """An editor marks an unknown event or field."""
    assert not validator.is_valid(YAML(typ="safe").load(f"{HEAD}expect: [{item}]"))


def test_the_schema_describes_every_event_and_fault() -> None:
    """All events, their fields and faults are in it, with a description."""
    schema = flow_schema()
    events = schema["$defs"]["event"]["anyOf"][1]["properties"]
    today = {event: set(part["properties"]) for event, part in events.items() if "deprecated" not in part}
    assert today == {event: set(fields) for event, fields in FIELDS.items()}
    do = schema["properties"]["faults"]["items"]["properties"]["do"]["anyOf"][1]["properties"]
    assert do.keys() == FAULTS.keys()
    assert all(part["description"] for part in (*events.values(), *do.values(), *schema["properties"].values()))


# ---------------------------------------- errors of a file whose keys are all valid


KILL = "  - {when: {state: running}, do: {kill_node: n1}, as: $dead}\n"


def flow_text(*expect: str, faults: str = "", job: str = "job.yaml", head: str = "") -> str:
    items = "".join(f"  - {item}\n" for item in expect)
    below = f"faults:\n{faults}" if faults else ""
    return f"job: {job}\n{head}expect:\n{items}{below}"


# -------------------------------------------------------------------------------------------------- captures

# file → line and name of the capture
UNBOUND = {
    flow_text("never: {node_lost: {node: $ded}}", faults=KILL): (3, "$ded"),
    flow_text("count: {node_lost: {node: $a}}\n    is: 1", "node_lost: {node: $a}"): (3, "$a"),
    flow_text("never: tick\n    until: {node_lost: {node: $a}}"): (4, "$a"),
    flow_text("node_lost: {node: '!= $a'}", "node_joined: {node: $a}"): (3, "$a"),
    flow_text("tick", faults="  - {when: {state: running}, do: {kill_node: $x}}\n"): (5, "$x"),
    flow_text("tick", faults="  - {when: {state: running}, do: {kill_node: $x}, as: $x}\n"): (5, "$x"),
    flow_text("tick", faults="  - {when: {event: fence, node: '!= $x'}, do: kill_store}\n"): (5, "$x"),
    flow_text("tick", faults=KILL + KILL): (6, "$dead"),
}

BOUND = [
    flow_text("never: {node_lost: {node: $dead}}", faults=KILL),
    flow_text("node_joined: {node: $a}", "node_lost: {node: '!= $a'}", "never: {node_lost: {node: $a}}"),
    flow_text("eventually: {node_joined: {node: $a}}", "never: {node_lost: {node: $a}}"),
    flow_text("any_order: [[node_joined: {node: $a}], [never: {node_lost: {node: $a}}]]"),
    flow_text("tick", faults="  - {when: {event: node_joined, node: $x}, do: {kill_node: $x}}\n"),
    flow_text("node_joined: {node: $x}", faults="  - {when: {state: running}, do: {kill_node: $x}}\n"),
    flow_text("tick", faults=f"{KILL}  - {{when: {{fault: 1}}, do: {{restore_node: $dead}}}}\n"),
]


@pytest.mark.parametrize(("flow", "place"), UNBOUND.items())
def test_a_capture_that_nothing_binds(write: Write, flow: str, place: tuple[int, str]) -> None:
    """A capture that is compared before anything can bind it, or that is bound twice, is an error at its line."""
    with pytest.raises(ConfigError) as caught:
        load_flow(write(flow))
    assert (caught.value.line, caught.value.key) == place


def test_what_a_stage_cannot_do_has_its_line(write: Write) -> None:
    """The error has the line of the key, not that of the flow."""
    flow = load_flow(write(flow_text("tick", head="name: small\non: [dev, local]\ncluster:\n  disk: 8m\n")))
    with pytest.raises(ConfigError) as caught:
        check_stage(flow, "slurm")
    assert re.findall(r"flow\.yaml:(\d+): (\S+):", str(caught.value)) == [("3", "on"), ("5", "cluster.disk")]


@pytest.mark.parametrize(
    ("faults", "able"),
    [
        (KILL + "  - {when: {fault: 1}, do: {restore_node: $dead}}\n", ["dev"]),
        (KILL + "  - {when: {fault: 1}, do: {restore_node: n1}}\n", ["dev"]),
        (KILL + "  - {when: {fault: 1}, do: {restore_node: {of_rank: 1}}}\n", ["local", "dev", "slurm"]),
        (KILL.replace("kill", "stop") + "  - {when: {fault: 1}, do: {restore_node: $dead}}\n", [*STAGES]),
    ],
)
def test_a_killed_node_boots_again_on_a_cluster_of_the_runs_own(write: Write, faults: str, able: list[str]) -> None:
    """A frozen node can be restored on any stage."""
    flow, found = load_flow(write(flow_text("tick", faults=faults))), []
    for stage in STAGES:
        with contextlib.suppress(ConfigError):
            check_stage(flow, stage)
            found.append(stage)
    assert found == able


def test_a_fault_that_outlasts_the_flow(write: Write) -> None:
    """The fault runs to its end before the limit is checked, so this is an error."""
    faults = "  - {when: {state: running}, do: {suspend: {lasts: 45s}}}\n"
    message = problem(write(flow_text("tick", faults=faults, head="limits: {wall: 10s}\n")))
    assert message.startswith("flow.yaml:6: suspend: ")


@pytest.mark.parametrize("name", ["lease", "guard.log"])
def test_a_flow_named_as_a_file_of_its_run(write: Write, name: str) -> None:
    """The name is refused: its attempts would need a folder of that name."""
    assert problem(write(flow_text("tick", head=f"name: {name}\n"))).startswith("flow.yaml:2: name: ")


@pytest.mark.parametrize(
    ("whens", "lines"),
    [
        (["{fault: 1}"], [5]),
        (["{event: tick}", "{fault: 3}", "{fault: 2}"], [6, 7]),
        (["{all: [{event: tick}, {fault: 2}]}", "{fault: 1}"], [5, 6]),
    ],
)
def test_faults_that_wait_for_each_other(write: Write, whens: list[str], lines: list[int]) -> None:
    """Such faults could never happen: they are an error."""
    faults = "".join(f"  - {{when: {when}, do: kill_store}}\n" for when in whens)
    found = problem(write(flow_text("tick", faults=faults)))
    assert [int(line) for line in re.findall(r"flow\.yaml:(\d+):", found)] == lines


def test_a_fault_that_need_not_wait_for_another(write: Write) -> None:
    """It is enough that one branch of `any` does not wait."""
    faults = (
        "  - {when: {any: [{event: tick}, {fault: 2}]}, do: kill_store}\n  - {when: {fault: 1}, do: kill_store}\n"
    )
    assert len(load_flow(write(flow_text("tick", faults=faults))).faults) == 2


def test_a_capture_that_nothing_binds_names_the_nearest(write: Write) -> None:
    """The name is often misspelled."""
    message = problem(write(flow_text("never: {node_lost: {node: $ded}}", faults=KILL)))
    assert message.endswith("nothing binds it before `never node_lost {node: $ded}` needs it; valid: $dead")


@pytest.mark.parametrize("flow", BOUND)
def test_a_capture_that_something_binds(write: Write, flow: str) -> None:
    """Faults, triggers and earlier expectations can bind the capture that an item compares."""
    load_flow(write(flow))


def test_an_order_that_cannot_be_is_no_error_of_the_file(write: Write) -> None:
    """Such a flow loads; it ends at its time limit with the nearest entry (test_matching)."""
    load_flow(write(flow_text("shutdown", "rendezvous_opened")))
