"""What happened, in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nvrx_slurm.attribution.analyze.findings import Finding
from nvrx_slurm.attribution.analyze.missing import Waiting

_MOST_NAMED = 6
_MOST_FAULTS = 3


def explanation(*sentences: str) -> str:
    """Sentences that are not empty, each with a capital and a full stop."""
    return " ".join(f"{each[:1].upper()}{each[1:].rstrip('.')}." for each in sentences if each)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`; `ranks 0, 1, 5`; `ranks 0, 1, … (16 in all)`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    return f"ranks {shown}" + (f", … ({len(ranks)} in all)" if len(ranks) > _MOST_NAMED else "")


def who(each: Finding) -> str:
    """`rank 3 on n2`, as far as known."""
    rank = "" if each.rank is None else f"rank {each.rank}"
    node = "" if each.node is None else f"{'on ' if rank else 'node '}{each.node}"
    return " ".join(part for part in (rank, node) if part) or "one rank"


def began(cause: Finding) -> str:
    """Who failed first, and of what; or who told first that something was wrong elsewhere."""
    how = "failed first" if cause.hit.rule.role == "cause" else "was the first to tell"
    return f"{who(cause)} {how}: {words_of(cause.hit.rule.fault)}"


def followed(after: Sequence[Finding]) -> str:
    """The cascade, by classes: `then nccl timeout (15 ranks), connection reset (3 ranks)`."""
    seen = {(each.hit.rule.fault, each.whose) for each in after}
    counts = Counter(fault for fault, _ in seen)
    told = [
        f"{words_of(fault)} ({count} rank{'s'[: count != 1]})" for fault, count in counts.most_common(_MOST_FAULTS)
    ]
    return f"then followed {', '.join(told)}" if told else ""


def waited_for(waiting: Waiting) -> str:
    """Who was missing, and how that is known."""
    return f"the others waited for {ranks_in_words(waiting.ranks)}: {waiting.how}" if waiting.ranks else ""


def words_of(fault: str) -> str:
    """`cuda_oom` → `cuda oom`."""
    return fault.replace("_", " ")
