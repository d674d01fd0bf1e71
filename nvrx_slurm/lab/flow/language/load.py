"""Flow files → flows: read, and checked against the journal's events and the job, before anything is submitted."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nvrx_slurm.errors import ConfigError, UsageError
from nvrx_slurm.jobspec import load as jobs
from nvrx_slurm.jobspec.plan import Plan, plan
from nvrx_slurm.jobspec.reading import dotted, read, together
from nvrx_slurm.jobspec.yamlfile import KeyPath, YamlFile, read_yaml
from nvrx_slurm.lab.flow.language.checks import check_captures, check_job, check_needs, check_order
from nvrx_slurm.lab.flow.language.expectation_form import read_expectations
from nvrx_slurm.lab.flow.language.fault_form import read_faults
from nvrx_slurm.lab.flow.language.faults import NEEDS
from nvrx_slurm.lab.flow.language.flow_form import FlowFile
from nvrx_slurm.lab.flow.language.model import Flow, Limits, Needs
from nvrx_slurm.lab.flow.language.problems import Problems, nearest
from nvrx_slurm.report.words import plural


def load_flow(path: Path) -> Flow:
    """The flow of a file. Raises ConfigError: one message that lists every problem with its file, line and key."""
    file = read_yaml(path)
    problems = Problems(str(path), file.lines)
    form = _form(file, problems)
    faults = read_faults(problems, _list(file, "faults"), ("faults",))
    expect = read_expectations(problems, _list(file, "expect"), ("expect",))
    job = _job(path, file, problems)
    check_captures(problems, faults, expect)
    if form is not None:
        check_needs(problems, faults, [need for need in NEEDS if getattr(form.cluster, need)])
    if job is not None:
        check_order(problems, expect, job)
        check_job(problems, faults, expect, job)
        _check_nodes(problems, form, job)
    if problems.found:
        raise together(problems.found)
    assert form is not None and job is not None
    return Flow(
        name=form.name or path.stem,
        about=form.about,
        file=path,
        line=1,
        job=path.parent / form.job,
        overrides=tuple((dotted(key), value) for key, value in _overrides(form.overrides)),
        on=form.on,
        needs=Needs(
            nodes=form.cluster.nodes or job.total_nodes,
            settings=form.cluster.settings,
            disk_bytes=form.cluster.disk,
            own_network=form.cluster.network == "own",
            attribution=form.cluster.attribution,
        ),
        faults=faults,
        expect=expect,
        limits=Limits(wall_s=form.limits.wall),
    )


def load_flows(paths: Sequence[Path], only: Sequence[str] = ()) -> list[Flow]:
    """The flows of files, and of all `*.yaml` files of folders, whose names fit one of the globs `only` (none: all).

    Raises ConfigError with the problems of all files; UsageError if no flow is left.
    """
    flows: list[Flow] = []
    found: list[ConfigError] = []
    for path in dict.fromkeys(file for each in paths for file in _files(each)):
        try:
            flows.append(load_flow(path))
        except ConfigError as error:
            found.append(error)
    found += _same_names(flows)
    if found:
        raise together(found) if len(found) == 1 else ConfigError("\n".join(map(str, found)))
    chosen = [flow for flow in flows if not only or any(fnmatch.fnmatchcase(flow.name, glob) for glob in only)]
    if not chosen:
        raise _none_left(paths, only, [flow.name for flow in flows])
    return chosen


# ------------------------------------------------------------------------------------------------- the file


def _form(file: YamlFile, problems: Problems) -> FlowFile | None:
    form, complaints = read(FlowFile, file.data)
    for key, sentence in complaints.items():
        problems.add(sentence, *key)
    if form is not None and not form.expect:
        problems.add("must expect something, such as `job_ended: {exit_code: 0}`", "expect")
    return form


def _list(file: YamlFile, key: str) -> list[Any]:
    """The items below the key; none where the form has complained of it."""
    raw = file.data.get(key)
    return raw if isinstance(raw, list) else []


# -------------------------------------------------------------------------------------------------- the job


def _job(path: Path, file: YamlFile, problems: Problems) -> Plan | None:
    """What the job is with the flow's overrides; None where it is not one. Its own problems name its own lines."""
    said, overrides = file.data.get("job"), file.data.get("overrides") or {}
    if not isinstance(said, str) or not isinstance(overrides, dict):
        return None
    job_file = path.parent / said
    if not job_file.is_file():
        near = nearest(job_file.name, [other.name for other in sorted(job_file.parent.glob("*.yaml"))])
        problems.add(f"there is no file {job_file}; in that folder, {near}", "job")
        return None
    if not _are_clear(overrides, problems):
        return None
    flags = [
        (dotted(key), f"{path}:{problems.line(('overrides', *key))}", value) for key, value in _overrides(overrides)
    ]
    try:
        return plan(jobs.load(job_file, flags).spec, folder=path.parent, job_file=job_file)
    except UsageError as error:
        problems.found.append(error if isinstance(error, ConfigError) else ConfigError(str(error)))
        return None


def _overrides(said: Mapping[str, Any], at: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value with its path: keys of mappings, nested or dotted."""
    for key, value in said.items():
        if isinstance(value, dict) and value:
            yield from _overrides(value, (*at, key))
        else:
            yield (*at, key), value


def _are_clear(overrides: Mapping[str, Any], problems: Problems) -> bool:
    """No key is set twice, once nested and once dotted."""
    seen: set[str] = set()
    for path, _ in _overrides(overrides):
        key = dotted(path)
        if any(key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in seen):
            problems.add(f"`{key}` is set twice; write it once, nested or dotted", "overrides", *path)
            return False
        seen.add(key)
    return True


def _check_nodes(problems: Problems, form: FlowFile | None, job: Plan) -> None:
    if form is not None and form.cluster.nodes is not None and form.cluster.nodes < job.total_nodes:
        spares = f" ({plural(job.spares, 'hot spare')} included)" if job.spares else ""
        message = f"the job asks for {job.total_nodes} nodes{spares}; a cluster of {form.cluster.nodes} cannot run it"
        problems.add(message, "cluster", "nodes")


# ------------------------------------------------------------------------------------------------ many files


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.glob("*.yaml") if not file.name.endswith(".job.yaml"))
    if not found:
        raise UsageError(f"{path}: the folder holds no flow (*.yaml)")
    return found


def _same_names(flows: Sequence[Flow]) -> Iterator[ConfigError]:
    first: dict[str, Flow] = {}
    for flow in flows:
        other = first.setdefault(flow.name, flow)
        if other is not flow:
            message = f"{flow.name} is the name of {other.file} too; give one of them another"
            yield ConfigError(message, file=str(flow.file), line=flow.line, key="name")


def _none_left(paths: Sequence[Path], only: Sequence[str], names: Sequence[str]) -> UsageError:
    if not names:
        return UsageError("no flow: name a flow file, or a folder of them")
    return UsageError(f"no flow is called {' or '.join(only)}; {nearest(only[0], names)}")
