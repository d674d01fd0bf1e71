"""Whose output a file holds, by its path: the layouts of this tool, torchrun, srun, NeMo and PyTorch. Pure."""

from __future__ import annotations

import re
from pathlib import Path

from nvrx_slurm.attribution.scan.model import Kind, LogFile
from nvrx_slurm.journal.verdicts import Inquiry

_RANK = re.compile(r"(?:^|[._-])(?<!local[._-])(?:global_?rank|rank|task|proc)[._-]?(\d{1,6})(?!\d)", re.IGNORECASE)
_BARE_RANK = re.compile(
    r"(\d{1,3})\.(?:out|err|log|txt)|(?:std)?(?:out|err|log)[._-](\d{1,3})(?:\.(?:out|err|log|txt))?"
)
_TORCHRUN = re.compile(r"attempt_\d+/(\d{1,9})/std(?:out|err)\.log$")
_TRACE = re.compile(r"_trace(?:_rank)?_(\d{1,9})(?:\.\w+)?$")
_NODE = re.compile(r"(?:^|[._-])((?:node|nid|dgx|hgx|host|compute|cn)-?\d+(?:-\d+)*)(?=[._-]|$)")
_PARENTS_LOOKED_AT = 3


def log_file(path: Path, inquiry: Inquiry | None, *, flight_recorder: bool = False) -> LogFile:
    """What a path tells, completed by what is known of the job: a rank's node, a node's ranks."""
    parts = path.parts[-1 - _PARENTS_LOOKED_AT :]
    node = _node_of(parts, inquiry)
    rank = _rank_of(path, parts, inquiry, node)
    if node is None and rank is not None and inquiry is not None:
        node = inquiry.node_of(rank)
    return LogFile(path, rank, node, "flight_recorder" if flight_recorder else _kind_of(path, rank))


def _rank_of(path: Path, parts: tuple[str, ...], inquiry: Inquiry | None, node: str | None) -> int | None:
    if torchrun := _TORCHRUN.search(path.as_posix()):
        return _global(int(torchrun[1]), inquiry, node)
    if bare := _BARE_RANK.fullmatch(path.name) or _TRACE.search(path.name):
        return int(next(filter(None, bare.groups())))
    found = (_RANK.search(part) for part in reversed(parts))
    return next((int(rank[1]) for rank in found if rank), None)


def _global(local: int, inquiry: Inquiry | None, node: str | None) -> int | None:
    """The rank of one that is known by its place within a node; None: several nodes have such a one."""
    if inquiry is None or len(inquiry.nodes) <= 1:
        return local
    if node not in inquiry.nodes:
        return None
    return inquiry.nodes.index(node) * inquiry.workers_per_node + local


def _node_of(parts: tuple[str, ...], inquiry: Inquiry | None) -> str | None:
    if len(parts) > 1 and parts[-2] == "health":
        return Path(parts[-1]).stem
    for part in reversed(parts):
        for node in sorted(inquiry.nodes if inquiry else (), key=len, reverse=True):
            if re.search(rf"(?<![A-Za-z0-9]){re.escape(node)}(?![A-Za-z0-9])", part):
                return node
    found = _NODE.search(parts[-1])
    return found and found[1]


def _kind_of(path: Path, rank: int | None) -> Kind:
    name = path.name.lower()
    if path.parent.name == "stacks":
        return "stacks"
    if path.parent.name == "health":
        return "health"
    if ".err" in name or "stderr" in name:
        return "err"
    return "out" if "stdout" in name or (rank is not None and ".out" in name) else "mixed"
