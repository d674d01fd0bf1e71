"""Flow files → flows: read, and checked against the journal's events and the job, before anything is submitted."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import field

from nvrx_slurm.errors import ConfigError, UsageError
from nvrx_slurm.jobspec import load as jobs
from nvrx_slurm.jobspec.plan import Plan, plan
from nvrx_slurm.jobspec.reading import After, Before, Block, Schema, by_path, dotted, read, together
from nvrx_slurm.jobspec.values import AS_LIST, Duration, Line, Name, Nodes, Size
from nvrx_slurm.jobspec.yamlfile import YamlFile, read_yaml
from nvrx_slurm.lab.flow.artifacts import RUN_FILES
from nvrx_slurm.lab.flow.faults import FAULTS, NEEDS
from nvrx_slurm.lab.flow.model import (
    STAGES,
    AnyOrder,
    Count,
    Expectation,
    Fault,
    Flow,
    Never,
    OnEvent,
    OnFault,
    OnSeveral,
    StageName,
    Trigger,
    leaves,
)
from nvrx_slurm.lab.flow.parsing import read_expectations, read_faults
from nvrx_slurm.lab.flow.patterns import Equals, EventPattern
from nvrx_slurm.lab.flow.problems import Problems, nearest
from nvrx_slurm.report.words import plural
from nvrx_slurm.util.durations import words

# ------------------------------------------------------------------------------------- the keys of the file


def _some(stages: tuple[StageName, ...]) -> tuple[StageName, ...]:
    if not stages:
        raise ValueError(f"names no stage; leave it out for all of {', '.join(STAGES)}")
    return stages


def _disk_size(value: object) -> object:
    """`4m` as mount(8) has it."""
    is_short = isinstance(value, str) and value[-1:].lower() in ("k", "m", "g")
    return f"{value}iB" if is_short else value


Disk = Annotated[Size, Before(_disk_size), Schema({"type": "string", "examples": ["4m", "64MiB"]})]


def _behaviour(text: str) -> str:
    from nvrx_slurm.lab.faults.attribution_server import behaviour  # an HTTP server, which few flows need

    behaviour(text)
    return text


Behaviour = Annotated[Line, After(_behaviour)]
Stages = Annotated[
    tuple[StageName, ...],
    AS_LIST,
    After(_some),
    Schema({"type": ["array", "string"], "items": {"enum": list(STAGES)}}),
]


class ClusterNeeds(Block, frozen=True, kw_only=True):
    """What the flow needs of a cluster."""

    nodes: Annotated[
        Nodes | None, "How many nodes; not set: as many as the job asks for. A `dev` cluster gets that many."
    ] = None
    settings: Annotated[
        dict[str, Line], "A mapping of keys of `slurm.conf`, such as `{KillWait: 10}`. On `dev` only."
    ] = field(default_factory=dict)
    disk: Annotated[
        Disk | None, "The job's folder lies on a disk of this size, such as `4m`. On `local` and `dev` only."
    ] = None
    attribution: Annotated[
        Behaviour | None,
        "A scripted attribution service that the job asks, and how it behaves: `stop`, `restart`, "
        "`garbage`, `hang`, `slow:8s`, …; the message about a wrong one lists all. On `local` and `dev` only.",
    ] = None
    network: Annotated[
        Literal["own"] | None,
        "`own`: each node has a network of its own, which can be cut and slowed. On `local` only.",
    ] = None


class FlowLimits(Block, frozen=True, kw_only=True):
    """How long it may take."""

    wall: Annotated[Duration, "One attempt, its clean-up aside."] = 120.0


class FlowFile(Block, frozen=True, kw_only=True):
    """A flow: a job, faults that really happen to it, and what its journal must then say."""

    name: Annotated[Name | None, "What reports call it. Not set: the file's name without `.yaml`."] = None
    about: Annotated[Line, "One sentence: what holds if it passes."] = ""
    job: Annotated[Line, "The job.yaml to submit; relative to the folder of the flow file."]
    overrides: Annotated[
        dict[str, Any],
        "Keys of job.yaml that are otherwise here, nested or dotted (`slurm.time: 2m`). Checked as job.yaml is.",
    ] = field(default_factory=dict)
    on: Annotated[
        Stages,
        "Where it can run: `local` (this machine, no Slurm), `dev` (a Slurm started for it alone), "
        "`slurm` (the site's). On another stage it is skipped, and reported as left out.",
    ] = STAGES
    cluster: Annotated[ClusterNeeds, "What it needs of a cluster."] = ClusterNeeds()
    faults: Annotated[tuple[Any, ...], "What happens to the job, and when."] = ()
    expect: Annotated[tuple[Any, ...], "The entries that the journal must contain, in this order."]
    limits: Annotated[
        FlowLimits, "How long it may take: `wall`, for one attempt, its clean-up aside. Not set: two minutes."
    ] = FlowLimits()


# ---------------------------------------------------------------------------------------------- one file


def load_flow(path: Path) -> Flow:
    """The flow of a file. Raises ConfigError: one message that lists every problem with its file, line and key."""
    file = read_yaml(path)
    problems = Problems(str(path), file.lines)
    form, complaints = read(FlowFile, file.data)
    for key, sentence in complaints.items():
        problems.add(sentence, *key)
    if form is not None and not form.expect:
        problems.add("must expect something, such as `job_ended: {exit_code: 0}`", "expect")
    # Where the form is wrong, what can be read of the rest is checked all the same: one message lists every problem.
    raw = {key: file.data[key] if isinstance(file.data.get(key), list) else [] for key in ("faults", "expect")}
    faults = read_faults(problems, raw["faults"], ("faults",))
    expect = read_expectations(problems, raw["expect"], ("expect",))
    job = _plan_of_job(path, file, problems)
    if not problems.found:  # a trigger that could not be read says nothing of what it waits for
        _check_triggers(problems, faults)
    _check_captures(problems, faults, expect)
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        problems.add("the path of this file is not UTF-8, and no result of a run can hold it: rename what is not")
    if form is not None:
        if (name := form.name or path.stem) in RUN_FILES:
            problems.add(f"{name} is the name of a file of the run itself: give the flow another", "name")
        for fault in faults:
            lasts_s = float(fault.arguments.get("lasts", 0.0))
            if lasts_s >= form.limits.wall:  # nothing else is looked at meanwhile
                message = f"lasts {words(lasts_s)}, and limits.wall ends the flow after {words(form.limits.wall)}"
                problems.add_at(message, fault.line, fault.action)
            needs = FAULTS[fault.action].needs
            if needs is not None and not getattr(form.cluster, needs):
                problems.add_at(f"needs `cluster: {{{NEEDS[needs]}}}`", fault.line, fault.action)
    if job is not None:
        _check_job(problems, faults, expect, job)
        if form is not None and form.cluster.nodes is not None and form.cluster.nodes < job.total_nodes:
            spares = f" ({plural(job.spares, 'hot spare')} included)" if job.spares else ""
            asked = f"the job asks for {job.total_nodes} nodes{spares}"
            problems.add(f"{asked}; a cluster of {form.cluster.nodes} cannot run it", "cluster", "nodes")
    # Everything that can be wrong was looked at: the message lists all of it.
    if problems.found:
        raise together(problems.found)
    assert form is not None and job is not None
    return Flow(
        name=form.name or path.stem,
        about=form.about,
        file=path,
        job=path.parent / form.job,
        overrides=tuple((dotted(key), value) for key, value in by_path(form.overrides)),
        on=form.on,
        nodes=form.cluster.nodes or job.total_nodes,
        cluster=form.cluster,
        faults=faults,
        expect=expect,
        wall_s=form.limits.wall,
        lines={dotted(key): line for key, line in file.lines.items() if key[0] in ("on", "cluster")},
    )


def _plan_of_job(path: Path, file: YamlFile, problems: Problems) -> Plan | None:
    """The job with the flow's overrides; None where it is not one. A problem of job.yaml names its line there."""
    said, overrides = file.data.get("job"), file.data.get("overrides") or {}
    if not isinstance(said, str) or not isinstance(overrides, dict):
        return None
    job_file = path.parent / said
    if not job_file.is_file():
        near = nearest(job_file.name, [other.name for other in sorted(job_file.parent.glob("*.yaml"))])
        problems.add(f"there is no file {job_file}; in that folder, {near}", "job")
        return None
    flags: dict[str, tuple[str, Any]] = {}
    for at, value in by_path(overrides):
        key = dotted(at)
        # `slurm: {time: …}` and `slurm.time: …` in one file: neither is stronger.
        if any(key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in flags):
            problems.add(f"`{key}` is set twice; write it once, nested or dotted", "overrides", *at)
            return None
        flags[key] = (f"{path}:{problems.line(('overrides', *at))}", value)
    try:
        spec = jobs.load(job_file, [(key, where, value) for key, (where, value) in flags.items()]).spec
        return plan(spec, folder=path.parent, job_file=job_file)
    except UsageError as error:
        problems.found.append(error if isinstance(error, ConfigError) else ConfigError(str(error)))
        return None


# ------------------------------------------------------------------------------------------------ many files


def load_flows(paths: Sequence[Path], only: Sequence[str] = ()) -> list[Flow]:
    """The flows of files, and of all `*.yaml` files of folders, whose names fit one of the globs `only` (none: all).

    Raises ConfigError with the problems of all files; UsageError if there is no flow, or none that fits a glob.
    """
    # A dict keeps the order, and a file that is named twice, by itself and by its folder, is one flow.
    files: dict[Path, None] = {}
    for path in paths:
        inside = sorted(file for file in path.glob("*.yaml") if not file.name.endswith(".job.yaml"))
        if path.is_dir() and not inside:
            raise UsageError(f"{path}: the folder holds no flow (*.yaml)")
        files |= dict.fromkeys(inside if path.is_dir() else [path])
    flows: dict[str, Flow] = {}
    found: list[ConfigError] = []
    for path in files:
        try:
            flow = load_flow(path)
        except ConfigError as error:
            found.append(error)
            continue
        other = flows.setdefault(flow.name, flow)
        if other is not flow:
            message = f"{flow.name} is the name of {other.file} too; give one of them another"
            found.append(ConfigError(message, file=str(flow.file), line=1, key="name"))
    if found:
        raise together(found) if len(found) == 1 else ConfigError("\n".join(map(str, found)))
    chosen = [flow for flow in flows.values() if not only or any(fnmatch.fnmatchcase(flow.name, g) for g in only)]
    if not flows:
        raise UsageError("no flow: name a flow file, or a folder of them")
    # Each, or a name with a typo would be a flow that is never run, and never missed.
    for glob in only:
        if not fnmatch.filter(flows, glob):
            raise UsageError(f"no flow is called {glob}; {nearest(glob, flows)}")
    return chosen


# ------------------------------------------------------- what is wrong although each key is right


def _check_triggers(problems: Problems, faults: Sequence[Fault]) -> None:
    """No fault waits for itself, directly or in a circle."""
    stuck = {fault.number for fault in faults}

    def waits(trigger: Trigger) -> bool:
        if isinstance(trigger, OnSeveral):
            return (any if trigger.needs_all else all)(map(waits, trigger.of))
        return isinstance(trigger, OnFault) and trigger.number in stuck

    while free := {fault.number for fault in faults if not waits(fault.when)} & stuck:
        stuck -= free
    for fault in faults:
        if fault.number in stuck:
            problems.add_at(f"fault {fault.number} can never happen: it waits for itself", fault.line, "when")


def _check_captures(problems: Problems, faults: Sequence[Fault], expect: Sequence[Expectation]) -> None:
    """Every capture that is compared can have been bound by then."""
    first: dict[str, Fault] = {}
    for fault in faults:
        if fault.binds is not None and (other := first.setdefault(fault.binds, fault)) is not fault:
            problems.add_at(f"fault {other.number} (line {other.line}) binds it too", fault.line, f"${fault.binds}")
    # Expectations bind for faults, and triggers for expectations: which comes first is known only when the job runs.
    by_triggers = {name for event in _trigger_events(faults) for name in event.binds()}
    by_events = by_triggers | {name for event in _events(expect) for name in event.binds()}
    for fault in faults:
        # The name that a fault binds by `as` is unknown to that fault's own arguments.
        known = (first.keys() - {fault.binds}) | by_events
        _check_known(problems, fault.captures(), known, fault.line, fault.describe())
    for event in _trigger_events(faults):
        _check_known(problems, event.captures(), first.keys() | by_events, event.line, str(event))
    _check_sequence(problems, expect, first.keys() | by_triggers)


def _check_sequence(problems: Problems, items: Sequence[Expectation], known: Set[str]) -> Set[str]:
    """Returns what is bound once the items are met. Branches of `any_order` may bind for each other."""
    for item in items:
        if isinstance(item, AnyOrder):
            # Which branch comes first is open, so a capture of any of them counts as bound in all.
            within = known | {name for event in _events([item]) for name in event.binds()}
            for branch in item.branches:
                known |= _check_sequence(problems, branch, within)
        elif isinstance(item, (Never, Count)):
            for event in filter(None, (item.event, item.until)):
                _check_known(problems, event.captures(), known, event.line, str(item))
        else:
            known |= set(item.event.binds())
            _check_known(problems, item.event.captures(), known, item.line, str(item))
    return known


def _check_known(problems: Problems, names: Iterable[str], known: Set[str], line: int, what: str) -> None:
    for name in dict.fromkeys(names):
        if name not in known:
            near = f"; {nearest(f'${name}', [f'${other}' for other in sorted(known)])}" if known else ""
            problems.add_at(f"nothing binds it before `{what}` needs it{near}", line, f"${name}")


def _check_job(problems: Problems, faults: Sequence[Fault], expect: Sequence[Expectation], job: Plan) -> None:
    """Every rank, spare and replica that is named is one of the job's."""
    sizes = {replica: role.world_size for replica, role in job.replica_roles.items()}
    for fault in faults:
        replica, spare = fault.arguments.get("replica"), fault.arguments.get("spare")
        rank = fault.arguments.get("rank", fault.arguments.get("of_rank"))
        found = []
        if replica is not None and replica not in sizes:
            found.append(f"the job has no replica {replica}; {nearest(str(replica), sizes)}")
        elif isinstance(rank, int):
            # Without a replica the largest world counts. That it must be named is a problem of its own, below.
            largest = sizes[replica] if replica is not None else max(sizes.values())
            if rank >= largest:
                found.append(f"the job has no rank {rank}: its last is {largest - 1}")
            if replica is None and len(sizes) > 1:
                found.append(f"which replica's rank {rank}? Name one by `replica`: {', '.join(sizes)}")
        if spare is not None and spare > job.spares:
            there = f"the job has {plural(job.spares, 'hot spare')}, and no number {spare}"
            found.append(f"{there}; set `overrides: {{spares: …}}`")
        for message in found:
            problems.add_at(message, fault.line, fault.action)
    for event in chain(_events(expect), _trigger_events(faults)):
        for name, pattern in event.fields:
            value = pattern.value if isinstance(pattern, Equals) else None
            if name == "replica" and value not in (None, *sizes):
                message = f"the job has no replica {value}; {nearest(str(value), sizes)}"
                problems.add_at(message, event.line, f"{event.event}.replica")
            if name == "rank" and isinstance(value, int) and value >= max(sizes.values()):
                message = f"the job has no rank {value}: its last is {max(sizes.values()) - 1}"
                problems.add_at(message, event.line, f"{event.event}.rank")


def _events(items: Iterable[Expectation]) -> Iterator[EventPattern]:
    """Every event that the expectations name."""
    for item in items:
        if isinstance(item, AnyOrder):
            yield from _events(chain.from_iterable(item.branches))
        else:
            yield item.event
            if isinstance(item, (Never, Count)) and item.until is not None:
                yield item.until


def _trigger_events(faults: Iterable[Fault]) -> list[EventPattern]:
    return [leaf.pattern for fault in faults for leaf in leaves(fault.when) if isinstance(leaf, OnEvent)]
