"""Asking a running job for its workers' stacks: the request goes to the controller, the answers come by journal.

The workers go on meanwhile. Each node writes its ranks' stacks into files below the job folder, where they stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from nvrx_slurm.api.user_request import LOOK_S, SAY_AFTER_S, Say, UserRequest, ranks_there_are
from nvrx_slurm.errors import NvrxError, StoreUnreachable, UsageError, WaitTimeout
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import DumpAsked, DumpOrdered, StacksDumped
from nvrx_slurm.report.journal_stream import post
from nvrx_slurm.report.model import Value
from nvrx_slurm.report.snapshot import Snapshot
from nvrx_slurm.report.words import names, ranks_of, seconds
from nvrx_slurm.util.clock import Clock

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


class StackRequest(UserRequest):
    """One request for stacks. It is posted when the answers are first asked for.

    `ranks` empty: of all; `replica` None: of every replica. Raises as `UserRequest`, and UsageError for ranks or a
    replica that the job does not have, and where none of the ranks has a worker now.
    """

    def __init__(
        self,
        folder: JobFolder,
        *,
        ranks: Collection[int] = (),
        replica: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(folder, clock=clock, otherwise=_last)
        self._ranks, self._replica = tuple(sorted(set(ranks))), replica
        self._ordered = False
        replicas = self.chosen_replicas(replica)
        most = max(each.world_size for each in replicas)
        if unknown := [rank for rank in self._ranks if not 0 <= rank < most]:
            raise UsageError(f"no {ranks_of(unknown)}: {ranks_there_are(replicas)}")
        # Kept from here on: nodes that get workers later were not asked, and are not waited for.
        self._asked = self._nodes()
        if not self._asked:
            whose = ranks_of(self._ranks) if self._ranks else "no replica"
            has = f"{'have' if len(self._ranks) > 1 else 'has'} {'no' if self._ranks else 'a'} worker now"
            phases = ", ".join(f"{each.id} is {each.phase}" for each in replicas)
            raise UsageError(f"job {folder.job_id}: {whose} {has} ({phases}); try again when they run")

    @property
    def replicas(self) -> tuple[str, ...]:
        """The replicas whose workers are asked."""
        return tuple(dict.fromkeys(self.view.nodes[name].replica or "" for name in self._asked))

    @property
    def without_worker(self) -> tuple[int, ...]:
        """Those of the ranks asked for that no replica has a worker of now."""
        at_work = {rank for name in self._asked for rank in self.view.nodes[name].ranks}
        return tuple(rank for rank in self._ranks if rank not in at_work)

    def answers(self, timeout_s: float, say: Say | None = None) -> Iterator[NodeStacks]:
        """Each node's answer, as it arrives. `say` is called after 2 s, and again on a change, with what is awaited.

        A node that loses its workers meanwhile is not waited for. Raises WaitTimeout that names who did not answer,
        NvrxError where none is left that could, StoreUnreachable.
        """
        post(self.address(), DumpAsked(request=self.id, by=self.by, ranks=self._ranks, replica=self._replica))
        deadline = self.clock.monotonic() + timeout_s
        answered: set[str] = set()
        said = ""
        try:
            while missing := [name for name in self._nodes() if name in self._asked and name not in answered]:
                left_s = deadline - self.clock.monotonic()
                if left_s <= 0.0:
                    raise self._timeout(missing, timeout_s)
                what = "the controller to pass the request on"
                if self._ordered:
                    what = f"{names(missing)} to write down stacks"
                if say is not None and timeout_s - left_s >= SAY_AFTER_S and what != said:
                    said = what
                    say(f"waiting for {what}, up to {seconds(left_s)} more")
                for record in self.read(min(LOOK_S, left_s)):
                    if isinstance(record, DumpOrdered | StacksDumped) and record.request == self.id:
                        if isinstance(record, DumpOrdered):
                            self._ordered = True
                        elif record.node not in answered:
                            answered.add(record.node)
                            yield self._stacks_of(record)
                if self.journal.ended:
                    break
        finally:
            # Also when the caller takes no further answer: a generator that is dropped runs this, too.
            self.close()
        # Their workers are gone: `_nodes` names them no more, and nothing will come of them.
        if silent := [name for name in self._asked if name not in answered]:
            gone = f"the workers on {names(silent)} ended before they could answer"
            if not answered:
                raise NvrxError(f"{gone}; ask again when `status` says that they run")
            if say is not None:
                say(gone)

    def _nodes(self) -> list[str]:
        """The nodes that have workers of the ranks asked for, as far as the journal has been read."""
        found = []
        for node in self.view.nodes.values():
            replica = self.view.replicas.get(node.replica or "")
            if replica is None or replica.phase not in WITH_WORKERS or self._replica not in (None, node.replica):
                continue
            has_asked = not self._ranks or any(rank in self._ranks for rank in node.ranks)
            if has_asked and node.state == "active" and not node.done:
                found.append(node.name)
        return found

    def _stacks_of(self, record: StacksDumped) -> NodeStacks:
        stacks = []
        for rank, file in sorted(record.files.items()):
            try:
                text = (self.folder.path / file).read_text(errors="replace")
            except OSError as error:
                text = f"{file} cannot be read here: {error.strerror}\n"
            # The file holds earlier dumps, too. Each section's first line says which request it was written for.
            begins = text.rfind("\n", 0, max(0, text.find(self.id))) + 1
            stacks.append(
                RankStacks(
                    replica=self.view.nodes[record.node].replica or "",
                    rank=rank,
                    node=record.node,
                    file=file,
                    where=record.where.get(rank),
                    text=text[begins:],
                )
            )
        return NodeStacks(node=record.node, stacks=tuple(stacks), problems=record.problems)

    def _timeout(self, missing: Collection[str], timeout_s: float) -> NvrxError:
        if (error := self.journal.store_error) is not None:
            return StoreUnreachable(f"{error}; whether {names(missing)} wrote down stacks is not known")
        within = f"within {seconds(timeout_s)}"
        if not self._ordered:
            return WaitTimeout(f"the job's controller did not take up the request {within}; `status` says how it is")
        return WaitTimeout(f"{names(missing)} did not answer {within}; --timeout waits longer")


def _last(shot: Snapshot) -> str:
    stacks, only = shot.view.last_stacks, ", and only live workers have stacks"
    if stacks is None:
        return f"{only}; none were written down"
    return f"{only}; the last ones lie in {shot.folder.path / next(iter(stacks.files.values()))}"
