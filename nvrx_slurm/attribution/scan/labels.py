"""Whose line it is in a file that many write: what srun, torchrun, mpirun, pdsh, NCCL and syslog put before it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SRUN = re.compile(rb" *(\d{1,6}): ?")
_PDSH = re.compile(rb"([A-Za-z][\w.-]*\d[\w.-]*): (?= *\d{1,6}: |\[)")
_RANKS = (
    re.compile(
        rb"\[(?!rank\d)[a-z][a-z_]*(?P<local>\d{1,9})\]: ?"
    ),  # torchrun: a role's name, the rank within the node
    re.compile(rb"\[rank(?P<rank>\d{1,9})\]: ?"),  # PyTorch, within torchrun's
    re.compile(rb"\[[\w.-]+-\d+ (?P<rank>\d{1,9})\] "),  # our own job.log: the replica and its rank
    re.compile(rb"\[\d+,(?P<rank>\d{1,9})\]<std\w+>: ?"),  # mpirun --tag-output
)
_SAYS_RANK = re.compile(rb"\[(?:PG [^\]]{0,120})?Rank (\d{1,9})\]")
_SAYS_NODE = (
    re.compile(rb"([A-Za-z][\w.-]*):\d+:\d+ \[\d+\] NCCL "),
    re.compile(rb"[A-Z][a-z]{2} [ \d]\d [\d:.]{8,18} ([A-Za-z][\w.-]*) [\w./-]+(?:\[\d+\])?: "),
    re.compile(rb"20\d\d-\d\d-\d\dT[\w:.+-]+ ([A-Za-z][\w.-]*) [\w./-]+(?:\[\d+\])?: "),
)
_GUTTER = re.compile(rb" +(?:\| |\|$|\+ (?=Exception Group ))")
_LEAST_LABELLED = 0.8
_LOOKED_AT = 100


@dataclass(frozen=True, slots=True)
class Label:
    """What a line's beginning tells. `begin`: where the line proper begins, after labels and an exception group's
    gutter. `local_rank`: a rank within its node."""

    rank: int | None
    node: str | None
    local_rank: int | None
    begin: int


def by_srun(head: bytes) -> bool:
    """Whether a file's first lines have the task numbers of `srun --label`, so that `3: ` is one."""
    lines = [line for line in head.split(b"\n")[:_LOOKED_AT] if line.strip()]
    numbered = sum(_SRUN.match(line) is not None or _PDSH.match(line) is not None for line in lines)
    return bool(lines) and numbered >= _LEAST_LABELLED * len(lines)


def label_of(line: bytes, *, srun: bool) -> Label:
    """`srun`: the file is labelled by `srun --label`."""
    at, rank, local, node = 0, None, None, None
    if found := _PDSH.match(line):
        at, node, srun = found.end(), found[1].decode(), True
    if srun and (found := _SRUN.match(line, at)):
        at, rank = found.end(), int(found[1])
    for pattern in _RANKS:
        if found := pattern.match(line, at):
            at, parts = found.end(), found.groupdict()
            rank = int(parts["rank"]) if "rank" in parts else rank
            local = int(parts["local"]) if "local" in parts else local
    if found := _GUTTER.match(line, at):
        at = found.end()
    return Label(rank, node, local, at)


def told(line: bytes, begin: int) -> tuple[int | None, str | None]:
    """The rank and the node that a line itself names as its own, after its labels."""
    rank = _SAYS_RANK.search(line, begin, begin + 200)
    node = next((found for pattern in _SAYS_NODE if (found := pattern.match(line, begin))), None)
    return rank and int(rank[1]), node and node[1].decode()
