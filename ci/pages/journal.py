"""docs/journal.md: the fields of each record, from the records themselves."""

from __future__ import annotations

import ast
import inspect
import re
from itertools import pairwise
from typing import Annotated, Literal, get_args, get_origin

import msgspec

from nvrx_slurm.cluster.queue_place import QueuePlace
from nvrx_slurm.journal import records, restarts
from nvrx_slurm.report import model, snapshot
from nvrx_slurm.report.words import event_name

FAMILIES = (records.AnyFact, records.AnyDecision)
IN_PROCESS: tuple[type[msgspec.Struct], ...] = (restarts.InProcessRestart, restarts.RankFault, restarts.RankPhases)
STATUS_PARTS: tuple[type[msgspec.Struct], ...] = (
    snapshot.Status,
    snapshot.ReplicaStatus,
    snapshot.NodeStatus,
    model.RankView,
    model.SectionView,
    model.CycleView,
    model.Recovery,
    model.FailureView,
    model.InProcess,
    model.Decided,
    model.StacksView,
    QueuePlace,
    snapshot.JobLine,
)


# Names of types → what stands for them on the page: no bounds, and every value of a choice.
_WRITTEN_OUT = {
    name: kind.__origin__.__name__
    if get_origin(kind) is Annotated
    else f"Literal[{', '.join(map(repr, get_args(kind)))}]"
    for name, kind in (vars(records) | vars(model)).items()
    if get_origin(kind) in (Annotated, Literal)
}


def parts() -> dict[str, str]:
    """The parts of the page."""
    facts, decisions = ([_section(f"`{event_name(kind)}`", kind) for kind in get_args(family)] for family in FAMILIES)
    in_process, status = ([_section(kind.__name__, kind) for kind in kinds] for kinds in (IN_PROCESS, STATUS_PARTS))
    sections = {"facts": facts, "decisions": decisions, "in-process": in_process, "status": status}
    return {name: "\n".join(each) for name, each in sections.items()}


def _section(title: str, kind: type[msgspec.Struct]) -> str:
    """What its docstring says, and that of the value that it adds to; then its fields, its own first."""
    defaults = {field.name: field for field in msgspec.structs.fields(kind)}
    prose, rows = [], []
    for each in kind.__mro__:
        own = inspect.get_annotations(each) if issubclass(each, msgspec.Struct) else {}
        if each is kind or (own and issubclass(each, model.Value)):
            prose.append(inspect.cleandoc(each.__doc__ or ""))
        notes = _notes(each) if own else {}
        for name, annotation in own.items():
            field = defaults[name]
            written = re.sub(r"\w+", lambda word: _WRITTEN_OUT.get(word[0], word[0]), annotation).replace("|", "\\|")
            factory = field.default_factory
            default = field.default if factory is msgspec.NODEFAULT else factory()
            shown = "required" if field.required else f"`{default!r}`"
            rows.append(f"| `{name}` | `{written}` | {shown} | {notes.get(name, '')} |")
    table = ["| field | type | default | |", "|---|---|---|---|", *rows] if rows else ["No fields."]
    return "\n\n".join([f"### {title}", *prose, "\n".join([*table, ""])])


def _notes(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Its own fields that have a string below them, where editors look for it, too."""
    notes = {}
    # The interpreter drops these strings, so no process pays for them; the walk keeps siblings together, in order.
    for pair in pairwise(ast.walk(ast.parse(inspect.getsource(kind)))):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(note))):
                notes[name] = note
    return notes
