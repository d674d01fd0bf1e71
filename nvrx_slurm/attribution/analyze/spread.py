"""Which ranks and nodes share a failure. Pure.

A deterministic cause is one that all ranks share which reached that point. So what one of several nodes alone reports
is that node's, if ranks of others came further; and an exception that no rule knows, which every rank of several
nodes raises before the first step, is the program's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from nvrx_slurm.attribution.analyze.aftermath import Finality, Nature, nature
from nvrx_slurm.attribution.analyze.collectives import known_ranks
from nvrx_slurm.attribution.analyze.findings import OF_THE_MACHINE, Finding
from nvrx_slurm.attribution.scan import Scan
from nvrx_slurm.journal.verdicts import Evidence, Inquiry, Verdict

# Paths that each node has for itself.
_OF_THE_NODE = re.compile(
    r"[\s'\":=(]/(?:local\w*|tmp|raid|nvme\w*|var|run|dev|mnt/(?:local|nvme)\w*|scratch_local|ssd)/"
)

# What fails on all ranks at once, and passes: a service or a file system that they share.
_OF_A_SERVICE = re.compile(
    r"time(?:d[ -]?)?out|unavailable|unreachable|connect|refused|temporar|busy|retry|retries|\b50[0234]\b|\b429\b"
    r"|lock|throttl|rate limit|socket|network|server|service|storage|disk|quota|license|reset by",
    re.IGNORECASE,
)

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_FOLDERS = re.compile(r"/[\w./-]*/")
_LONGEST = 160

_VAGUE = ("exception", "runtime_error")
_LEAST_LINES = 2


class Spread(msgspec.Struct, frozen=True):
    """Who reports the cause. `ranks` and `nodes`: those with the same line, numbers aside. `everywhere`: that is all
    ranks. `only_node`: a node whose installation is at fault, since others came further.
    `of_the_program`: the same unknown exception on all ranks of several nodes, before the first step. `alone`: one
    rank of several, known ones reports it."""

    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    everywhere: bool = False
    only_node: str | None = None
    of_the_program: bool = False
    alone: bool = False


def fingerprint(fault: str, primary: Evidence, frames: str = "") -> str:
    """What makes two failures the same: class, words of the line without their numbers, innermost frame."""
    words = _NUMBERS.sub("#", _FOLDERS.sub("/", primary.text))[:_LONGEST]
    return f"{fault}|{words}|{frames.rpartition('|')[2]}"


def spread(cause: Finding, found: Sequence[Finding], inquiry: Inquiry, scan: Scan) -> Spread:
    """Of the cause of a failure among all findings."""
    rule = cause.hit.rule
    words = _words(cause)
    alive = [each for each in found if each.finality is not Finality.SURVIVED]
    same = [each for each in alive if each.hit.rule.fault == rule.fault and _words(each) == words]
    ranks = tuple(sorted({each.rank for each in same if each.rank is not None}))
    nodes = tuple(sorted({each.node for each in same if each.node is not None}))
    # Ranks that are known by their failures alone are not all ranks.
    with_files = {log.rank for log in scan.files if log.rank is not None}
    world = known_ranks(inquiry, scan) if inquiry.nodes or len(with_files) > 1 else frozenset()
    everywhere = len(world) > 1 and world <= set(ranks)
    of_the_program = (
        everywhere
        and len(nodes) > 1
        and rule.verdict is Verdict.UNKNOWN
        and rule.fault in _VAGUE
        and not any(each.stepped for each in same)
        and not _OF_A_SERVICE.search(cause.hit.text)
    )
    return Spread(
        ranks=ranks,
        nodes=nodes,
        everywhere=everywhere,
        only_node=_only_node(cause, alive, inquiry, scan),
        of_the_program=of_the_program,
        alone=len(world) > 1 and len({each.rank for each in alive if each.hit.rule.fault == rule.fault}) == 1,
    )


def _words(each: Finding) -> str:
    return fingerprint(each.hit.rule.fault, each.evidence).partition("] ")[2] or fingerprint("", each.evidence)


def _only_node(cause: Finding, alive: Sequence[Finding], inquiry: Inquiry, scan: Scan) -> str | None:
    """The only one of several nodes whose ranks report a fault of the installation, as all of them do or by the name
    of a path of its own; None: another node reports it, too, or none came further."""
    rule, node = cause.hit.rule, cause.node
    if not rule.environment or node is None:
        return None
    same = [each for each in alive if each.hit.rule.fault == rule.fault]
    if {each.node for each in same} != {node}:
        return None
    everyone = {*inquiry.nodes} or {log.node for log in scan.files if log.node is not None}
    others = everyone - {node}
    reporters = {each.rank for each in same if each.rank is not None}
    here = inquiry.workers_per_node if inquiry.nodes else len({log.rank for log in scan.files if log.node == node})
    if not others or (here > 1 and 2 * len(reporters) <= here and not _OF_THE_NODE.search(cause.hit.text)):
        return None
    noticed = any(each.node in others and each.hit.rule.verdict is Verdict.RESTART for each in alive)
    # Ranks of a node came further where they print more than the end of a process.
    lines: Counter[str | None] = Counter()
    for log in scan.files:
        if log.node in others and log.kind not in OF_THE_MACHINE:
            lines[log.node] += sum(nature(line) in (Nature.PROGRESS, Nature.CALM) for line in scan.of(log).tail)
    return node if noticed or any(count >= _LEAST_LINES for count in lines.values()) else None
