"""Durations, lists of names, and the events of nodes and workers, in words. Pure."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import get_args

import msgspec

from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal import records
from nvrx_slurm.journal.records import AnyRecord
from nvrx_slurm.journal.verdicts import Evidence, Failed
from nvrx_slurm.util.signals import signal_name

# Of a number in a node's name that is folded. Python refuses to read one of more than 4,300 digits.
MOST_DIGITS = 18


def event_name(record: AnyRecord | type[msgspec.Struct]) -> str:
    """The name in the journal of a record, or of its kind: `node_lost`."""
    return str(record.__struct_config__.tag)


def event_names() -> list[str]:
    """The names of all events."""
    return sorted(event_name(kind) for family in (records.AnyFact, records.AnyDecision) for kind in get_args(family))


def chosen_events(patterns: Iterable[str]) -> set[str]:
    """The events that these names mean: `node_lost`, `node_*`, or several with commas. Raises UsageError."""
    known, chosen = event_names(), set[str]()
    for pattern in (each.strip() for text in patterns for each in text.split(",")):
        found = fnmatch.filter(known, pattern)
        if not found:
            near = difflib.get_close_matches(pattern, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"no event {pattern!r}: {hint}")
        chosen.update(found)
    return chosen


def seconds(duration_s: float) -> str:
    """`312 ms`, `4.21 s`, `42.1 s`, `4m 10s`, `3h 04m`, `2d 03h`: three significant digits and a unit."""
    # The bounds lie where rounding carries over: 59.96 s would read `60.0 s`, and not `1m 00s`.
    if duration_s < 0.0995:
        return f"{duration_s * 1000:.1f} ms"
    if duration_s < 0.9995:
        return f"{duration_s * 1000:.0f} ms"
    if duration_s < 59.95:
        return f"{duration_s:.{2 if duration_s < 9.995 else 1}f} s"
    whole = round(duration_s)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02}h"


def percent(share: float | None) -> str:
    """`97.3%`; `–` where it is not known."""
    return "–" if share is None else f"{share:.1%}"


def size(count_bytes: int) -> str:
    """`812 MiB`, `2.4 GiB`: rounded."""
    mebibytes = count_bytes / 2**20
    return f"{mebibytes:.0f} MiB" if mebibytes < 1000 else f"{mebibytes / 1024:.1f} GiB"


def names(nodes: Iterable[str]) -> str:
    """Node names as Slurm folds them, where that is shorter: `n[0-3,5]`; nothing is `-`."""
    split = []
    for name in nodes:
        prefix = name.rstrip("0123456789")
        digits = name[len(prefix) :]
        split.append((prefix, digits) if len(digits) <= MOST_DIGITS else (name, ""))
    folded = []
    # Only neighbours are folded: the order is that of ranks, and stays.
    for prefix, group in groupby(split, key=lambda pair: pair[0]):
        numbered = [digits for _, digits in group]
        if len(numbered) == 1 or "" in numbered:
            folded += [prefix + digits for digits in numbered]
        else:
            folded.append(f"{prefix}[{','.join(_ranges(numbered))}]")
    return ",".join(folded) or "-"


def numbers(values: Iterable[int]) -> str:
    """Ranks as ranges: `0-3,6`; nothing is `-`."""
    return ",".join(_ranges([str(value) for value in sorted(values)])) or "-"


def ranks_of(ranks: Collection[int]) -> str:
    """`rank 3`, `ranks 0-2,5`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers(ranks)}"


def at_step(step: int | None, *, said: str = "") -> str:
    """`, at step 80`; nothing where the step is not known, or `said` names it already."""
    if step is None or re.search(rf"\bstep {step}\b", said):
        return ""
    return f", at step {step}"


def at_last_step(failed: Failed, last_step: int | None) -> str:
    """The same for a failure: the step that its own report names; and where another rank of the cycle had reported a
    later one, that too, since steps lost are counted from there. `last_step`: the last one of any rank."""
    if failed.step is None or last_step is None or last_step <= failed.step:
        return at_step(last_step if failed.step is None else failed.step, said=failed.cause)
    return f"{at_step(failed.step, said=failed.cause)}; another rank had reached step {last_step}"


def worker_end(record: records.WorkerFailed) -> str:
    """How a worker ended: `rank 3 on n2 was killed by SIGKILL`."""
    who = f"rank {record.rank} on {record.node}"
    if record.error is not None:
        return f"{who} {'could not start' if record.exit_code is None else 'failed'}: {record.error}"
    if record.signal is not None:
        return f"{who} was killed by {signal_name(record.signal)}"
    return f"{who} exited with code {record.exit_code}"


def others_lost_it(ranks: Collection[int]) -> str:
    """What followed from a failure: `3 other ranks then lost their connection to it`; nothing, if nothing did."""
    if not ranks:
        return ""
    return f"{plural(len(ranks), 'other rank')} then lost {'its' if len(ranks) == 1 else 'their'} connection to it"


def worker_hang(record: records.WorkerHung) -> str:
    """How a worker hangs: `rank 3 on n2 hung: no step for 612 s (limit 600 s), in train.py:41 in step`."""
    where = f", in {record.where}" if record.where else ""
    return f"rank {record.rank} on {record.node} hung: {record.why}{where}"


def isolation(record: records.NodeIsolated) -> str:
    """Why a node stopped its own workers."""
    return f"{record.node} had lost store and controller for {seconds(record.for_s)} and stopped its workers"


def ranks_wait(duration_s: float) -> str:
    """The cost of a loss without proof of death: `its ranks wait up to 32.0 s for proof of its death`."""
    return f"its ranks wait up to {seconds(duration_s)} for proof of its death"


def slurm_state(record: records.SlurmNodeState) -> str:
    """`DOWN+NOT_RESPONDING (Not responding)`."""
    return f"{record.state} ({record.reason})" if record.reason else record.state


def how_started(warm: int, cold: str | None, count: int | None = None) -> str:
    """`8 workers warm`; `6 workers warm, 2 cold: …`; `cold: …`, or `cold` without a reason; nothing where no warm
    process was asked for."""
    parts = [f"{plural(warm, 'worker')} warm"] if warm else []
    if cold is not None:
        others = f"{count - warm} " if warm and count is not None else "others " if warm else ""
        parts.append(f"{others}cold: {cold}" if cold else f"{others}cold")
    return ", ".join(parts)


def phases_in_words(phases: Mapping[str, float]) -> str:
    """`torn down 180 ms, closed 20.0 ms`."""
    return ", ".join(f"{name.replace('_', ' ')} {seconds(took_s)}" for name, took_s in phases.items())


def to_move(record: records.RestartOrdered) -> str:
    """Why a user's restart takes place, if it is for a drain."""
    return "" if record.node is None else f" to move the ranks of {record.node}"


def asked_for(restarts: int) -> str:
    """`users asked for 2 restarts, which no budget counts`."""
    return f"users asked for {plural(restarts, 'restart')}, which no budget counts"


def by_consequence(lines: Iterable[Evidence]) -> list[tuple[Evidence, int]]:
    """The first line of each class of consequence, by the first part of its rule's name, and how many more there
    are."""
    classes: dict[str, list[Evidence]] = {}
    for each in lines:
        classes.setdefault(each.rule.partition(".")[0], []).append(each)
    return [(found[0], len(found) - 1) for found in classes.values()]


def shares(parts: Sequence[int]) -> list[int]:
    """Each part in thousandths of their sum. These add up to 1,000: what rounding leaves goes to the largest
    remainders."""
    whole = sum(parts)
    if not whole:
        return [0] * len(parts)
    floors = [part * 1000 // whole for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda index: parts[index] * 1000 % whole, reverse=True)
    for index in by_remainder[: 1000 - sum(floors)]:
        floors[index] += 1
    return floors


def spares_of(left: int, planned: int | None, sign: str = " of ") -> str:
    """`1 of 2`. The count alone where it is higher: the nodes of replicas that are done stand by as spares, too."""
    return f"{left}" if planned is None or left > planned else f"{left}{sign}{planned}"


def plural(count: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _ranges(digits: list[str]) -> list[str]:
    """Runs of consecutive numbers of the same width, in the order given."""
    runs: list[list[str]] = []
    for number in digits:
        before = runs[-1][-1] if runs else ""
        # `9` and `10` follow each other, `09` and `10` too; `9` and `010` do not.
        is_padded = number.startswith("0") or before.startswith("0")
        if before and int(number) == int(before) + 1 and (len(number) == len(before) or not is_padded):
            runs[-1].append(number)
        else:
            runs.append([number])
    return [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
