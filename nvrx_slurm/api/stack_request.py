"""Asking a running job for its workers' stacks: the request goes to the controller, the answers come by journal.

The workers go on meanwhile. Each node writes its ranks' stacks into files below the job folder, where they stay.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator

from nvrx_slurm.api.user_request import LOOK_S, SAY_AFTER_S, Say, asker, running
from nvrx_slurm.errors import NvrxError, StoreUnreachable, UsageError, WaitTimeout
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import DumpAsked, DumpOrdered, Entry, StacksDumped
from nvrx_slurm.report.journal_stream import post
from nvrx_slurm.report.model import Value
from nvrx_slurm.report.snapshot import Snapshot
from nvrx_slurm.report.source import Journal
from nvrx_slurm.report.view import fold
from nvrx_slurm.report.words import names, numbers, ranks_of, seconds
from nvrx_slurm.util.clock import Clock, SystemClock

WITH_WORKERS = ("starting", "running")


class RankStacks(Value, frozen=True, kw_only=True):
    """What one rank, and all that it started, are doing. `file`: below the job folder; `where`: innermost line."""

    replica: str
    rank: int
    node: str
    file: str
    where: str | None
    text: str


class NodeStacks(Value, frozen=True, kw_only=True):
    """What one node wrote down. `problems`: what could not be had, and why."""

    node: str
    stacks: tuple[RankStacks, ...]
    problems: tuple[str, ...]


class StackRequest:
    """One request for stacks. It is posted when the answers are first asked for.

    `ranks` empty: of all; `replica` None: of every replica. Raises UsageError for a job that does not run, for ranks
    or a replica that it does not have, and where none of the ranks has a worker now; StoreUnreachable.
    """

    def __init__(
        self,
        folder: JobFolder,
        *,
        ranks: Collection[int] = (),
        replica: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._folder, self._clock = folder, clock or SystemClock()
        self._ranks, self._replica = tuple(sorted(set(ranks))), replica
        self._id = secrets.token_hex(4)
        self._ordered = False
        shot = running(folder, clock, otherwise=_last)
        job = shot.folder.job_id
        self._view = shot.view
        if replica is not None and replica not in self._view.replicas:
            raise UsageError(f"no replica {replica!r}: the job has {', '.join(self._view.replicas)}")
        worlds = {each.id: each.world_size for each in self._view.replicas.values() if replica in (None, each.id)}
        unknown = [rank for rank in self._ranks if not 0 <= rank < max(worlds.values())]
        if unknown:
            there = "; ".join(f"{name} has ranks {numbers(range(size))}" for name, size in worlds.items())
            raise UsageError(f"no {ranks_of(unknown)}: {there}")
        self._asked = self._nodes()
        if not self._asked:
            whose = ranks_of(self._ranks) if self._ranks else "no replica"
            has = f"{'have' if len(self._ranks) > 1 else 'has'} {'no' if self._ranks else 'a'} worker now"
            phases = (
                f"{each.id} is {each.phase}" for each in self._view.replicas.values() if replica in (None, each.id)
            )
            raise UsageError(f"job {job}: {whose} {has} ({', '.join(phases)}); try again when they run")

    @property
    def replicas(self) -> tuple[str, ...]:
        """The replicas whose workers are asked."""
        return tuple(dict.fromkeys(self._view.nodes[name].replica or "" for name in self._asked))

    @property
    def without_worker(self) -> tuple[int, ...]:
        """Those of the ranks asked for that no replica has a worker of now."""
        at_work = {rank for name in self._asked for rank in self._view.nodes[name].ranks}
        return tuple(rank for rank in self._ranks if rank not in at_work)

    def answers(self, timeout_s: float, say: Say | None = None) -> Iterator[NodeStacks]:
        """Each node's answer, as it arrives. `say` is called after 2 s, and again on a change, with what is awaited.

        A node that loses its workers meanwhile is not waited for. Raises WaitTimeout that names who did not answer,
        NvrxError where none is left that could, StoreUnreachable.
        """
        address = self._folder.read_store()
        if address is None:
            raise UsageError(f"job {self._folder.job_id} has just ended")
        deadline = self._clock.monotonic() + timeout_s
        post(address, DumpAsked(request=self._id, by=asker(), ranks=self._ranks, replica=self._replica))
        journal = Journal(self._folder, after=self._view.n, clock=self._clock)
        answered: set[str] = set()
        said = ""
        try:
            while missing := [name for name in self._nodes() if name in self._asked and name not in answered]:
                left_s = deadline - self._clock.monotonic()
                if left_s <= 0.0:
                    raise self._timeout(missing, timeout_s, journal.store_error)
                what = (
                    f"{names(missing)} to write down stacks"
                    if self._ordered
                    else "the controller to pass the request on"
                )
                if say is not None and timeout_s - left_s >= SAY_AFTER_S and what != said:
                    said = what
                    say(f"waiting for {what}, up to {seconds(left_s)} more")
                for item in journal.poll(min(LOOK_S, left_s)):
                    assert isinstance(item, Entry)  # no heartbeats were asked for
                    fold(self._view, item)
                    record = item.record
                    self._ordered |= isinstance(record, DumpOrdered) and record.request == self._id
                    if (
                        isinstance(record, StacksDumped)
                        and record.request == self._id
                        and record.node not in answered
                    ):
                        answered.add(record.node)
                        yield self._stacks(record)
                if journal.ended:
                    break
        finally:
            journal.close()
        if silent := [name for name in self._asked if name not in answered]:
            gone = f"the workers on {names(silent)} ended before they could answer"
            if not answered:
                raise NvrxError(f"{gone}; ask again when `status` says that they run")
            if say is not None:
                say(gone)

    def _nodes(self) -> list[str]:
        """The nodes that have workers of the ranks asked for, as far as the journal has been read."""
        view, found = self._view, []
        for node in view.nodes.values():
            replica = view.replicas.get(node.replica or "")
            if replica is None or replica.phase not in WITH_WORKERS or self._replica not in (None, node.replica):
                continue
            has_asked = not self._ranks or any(rank in self._ranks for rank in node.ranks)
            if has_asked and node.state == "active" and not node.done:
                found.append(node.name)
        return found

    def _stacks(self, record: StacksDumped) -> NodeStacks:
        stacks = []
        for rank, file in sorted(record.files.items()):
            try:
                text = (self._folder.path / file).read_text(errors="replace")
            except OSError as error:
                text = f"{file} cannot be read here: {error.strerror}\n"
            # The file holds earlier dumps, too. Each section's first line says which request it was written for.
            begins = text.rfind("\n", 0, max(0, text.find(self._id))) + 1
            stacks.append(
                RankStacks(
                    replica=self._view.nodes[record.node].replica or "",
                    rank=rank,
                    node=record.node,
                    file=file,
                    where=record.where.get(rank),
                    text=text[begins:],
                )
            )
        return NodeStacks(node=record.node, stacks=tuple(stacks), problems=record.problems)

    def _timeout(self, missing: Collection[str], timeout_s: float, store_error: str | None) -> NvrxError:
        if store_error is not None:
            return StoreUnreachable(f"{store_error}; whether {names(missing)} wrote down stacks is not known")
        within = f"within {seconds(timeout_s)}"
        if not self._ordered:
            return WaitTimeout(f"the job's controller did not take up the request {within}; `status` says how it is")
        return WaitTimeout(f"{names(missing)} did not answer {within}; --timeout waits longer")


def _last(shot: Snapshot) -> str:
    stacks, only = shot.view.last_stacks, ", and only live workers have stacks"
    if stacks is None:
        return f"{only}; none were written down"
    return f"{only}; the last ones lie in {shot.folder.path / next(iter(stacks.files.values()))}"
