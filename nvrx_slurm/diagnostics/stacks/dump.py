"""Stacks of this node's processes, into one file a rank, within one bound."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from nvrx_slurm.diagnostics.stacks.accounts import Account, Accounting, Bounds, Method, left_s
from nvrx_slurm.diagnostics.stacks.aside import aside
from nvrx_slurm.diagnostics.stacks.asking import sweep
from nvrx_slurm.diagnostics.stacks.programs import gpu_state
from nvrx_slurm.diagnostics.stacks.traces import innermost_frame
from nvrx_slurm.diagnostics.stacks.writing import Writing
from nvrx_slurm.util.clock import Clock, SystemClock

GPU_LABEL = "gpus"


@dataclass(frozen=True, slots=True)
class Report:
    """What a dump has found.

    `files`: label → the file that was appended to. `answered`: how each living process was reached. `last_lines`:
    label → where its main thread is, such as `train.py:41 in step`. `problems`: sentences, one for each file that
    could not be written.
    """

    files: Mapping[str, Path]
    answered: Mapping[Method, tuple[int, ...]]
    last_lines: Mapping[str, str]
    problems: tuple[str, ...]


async def dump(
    groups: Mapping[str, Sequence[int]],
    *,
    dump_dir: Path,
    out: Path,
    why: str,
    timeout_s: float,
    py_spy: bool = True,
    may_pause: bool = False,
    gpus: bool = False,
    clock: Clock | None = None,
) -> Report:
    """Write the stacks of every process of `groups` (label, such as "rank 3" → its worker, then its descendants).

    Promises: it returns after about `timeout_s` seconds at most, and what hangs is named in the report; no process is
    stopped, or killed by the question; one that ends meanwhile is no problem. `may_pause`, for processes that are
    about to be ended, lets py-spy stop one for some milliseconds and see native frames too.

    `out` gets `<label>.txt`, with dashes for spaces, appended to; with `gpus`, and where there is nvidia-smi, also
    `gpus.txt`. `dump_dir` is the one that the workers' `hook_environment` was made with; one dump of it at a time.
    """
    bounds = Bounds.within(timeout_s)
    head = f"{_utc(clock or SystemClock())} {why}"
    accounting = Accounting(groups, dump_dir, bounds, py_spy=py_spy, may_pause=may_pause)
    accounts, gpu_text = await asyncio.gather(
        accounting.all(), gpu_state(left_s(bounds.spying)) if gpus else asyncio.sleep(0, None)
    )
    texts = {label: _text(head, label, group) for label, group in accounts.items()}
    if gpu_text is not None:
        texts[GPU_LABEL] = f"=== {head}\n{gpu_text}\n\n"
    writing = Writing(out, texts)
    # A file system that does not answer keeps the thread, not us.
    work = [aside(writing.run, "write stacks"), aside(partial(sweep, dump_dir), "sweep stacks")]
    await asyncio.wait(work, timeout=left_s(bounds.writing))
    return _report(accounts, writing)


def _utc(clock: Clock) -> str:
    return f"{datetime.fromtimestamp(clock.wall(), UTC):%Y-%m-%dT%H:%M:%SZ}"


def _text(head: str, label: str, group: Sequence[Account]) -> str:
    return "".join(_section(head, label, account) for account in group)


def _section(head: str, label: str, account: Account) -> str:
    """One process: who and why, what is missing, its stacks, and what /proc says."""
    name = f" ({account.state.name})" if account.state else ""
    title = f"=== {head} | {label}, pid {account.pid}{name}"
    if account.method is None:
        return f"{title}\nit has ended\n\n"
    lines = [title, account.note, account.stacks.strip("\n")]
    proc = account.state.text() if account.state else "  /proc did not answer in time\n"
    return "\n".join(filter(None, lines)) + f"\n{proc}\n"


def _report(accounts: Mapping[str, Sequence[Account]], writing: Writing) -> Report:
    everybody = {account.pid: account for group in accounts.values() for account in group}.values()
    frames = ((label, innermost_frame(account.stacks)) for label, group in accounts.items() for account in group)
    last_lines: dict[str, str] = {}
    for label, frame in frames:
        if frame is not None:
            last_lines.setdefault(label, frame)  # the worker's own before its descendants'
    return Report(
        files=writing.files(),
        answered={way: tuple(each.pid for each in everybody if each.method is way) for way in Method},
        last_lines=last_lines,
        problems=writing.problems(),
    )
