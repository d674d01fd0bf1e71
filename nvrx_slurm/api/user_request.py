"""What a user asks a running job to do: restart, drain a node, undrain it; end, from another host.

The request goes to the controller, which journals it and answers by journal, as with stacks (`stack_request.py`).
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence

from nvrx_slurm.errors import RefusedByJob, StoreUnreachable, UsageError, WaitTimeout
from nvrx_slurm.journal.folder import JobFolder, StoreAddress
from nvrx_slurm.journal.records import (
    AnyFact,
    AnyRecord,
    CommandOrdered,
    DrainAsked,
    Entry,
    NodeDrained,
    NodeUndrained,
    RequestRefused,
    RestartAsked,
    RestartOrdered,
    Shutdown,
    Signalled,
    UndrainAsked,
)
from nvrx_slurm.report import snapshot
from nvrx_slurm.report.jobs import refuse_array
from nvrx_slurm.report.journal_stream import post
from nvrx_slurm.report.model import JobView, ReplicaView
from nvrx_slurm.report.page import waiting
from nvrx_slurm.report.snapshot import Snapshot
from nvrx_slurm.report.source import Journal
from nvrx_slurm.report.view import fold
from nvrx_slurm.report.words import names, numbers, seconds
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.ownership import login_name

SAY_AFTER_S = 2.0
LOOK_S = 0.5

Say = Callable[[str], None]
ANSWERS = (RestartOrdered, NodeDrained, NodeUndrained, CommandOrdered)


def ranks_there_are(replicas: Iterable[ReplicaView]) -> str:
    """`main-0 has ranks 0-7; …`"""
    return "; ".join(f"{each.id} has ranks {numbers(range(each.world_size))}" for each in replicas)


class UserRequest:
    """One request to one job. Raises UsageError for a job that has ended or has not begun, StoreUnreachable.

    `wait` follows what the request has set in motion.
    """

    def __init__(
        self,
        folder: JobFolder,
        *,
        clock: Clock | None = None,
        otherwise: Callable[[Snapshot], str] | None = None,
    ) -> None:
        """`otherwise`: what to say of a job that does not run, beside that."""
        self.folder, self.clock = folder, clock or SystemClock()
        shot = snapshot.take(folder, clock=clock)
        job, rest = folder.job_id, "" if otherwise is None else otherwise(shot)
        if shot.is_over:
            raise UsageError(f"job {job} has ended ({shot.state}){rest}")
        if shot.store_error is not None:
            raise StoreUnreachable(f"{shot.store_error}{rest}")
        if not shot.view.replicas or folder.read_store() is None:
            refuse_array(folder)
            raise UsageError(f"job {job} is {shot.state}: it has no workers yet")
        self.view: JobView = shot.view
        self.leaves = False
        """A signal handler sets it: nothing is waited for any more."""
        self.id = secrets.token_hex(4)
        # Who asks, for the journal: `ada@login1`.
        self.by = f"{login_name(os.getuid()) or os.getuid()}@{socket.gethostname()}"
        # From where the view ends: no answer to a request can stand in front of it.
        self.journal = Journal(folder, after=self.view.n, clock=self.clock)

    def close(self) -> None:
        self.journal.close()

    def restart(self, replica: str | None, timeout_s: float, say: Say | None = None) -> list[RestartOrdered]:
        """Have a replica restarted; None: all that run. Which restart: more, where a role restarts the whole job.

        Raises UsageError for a replica that there is not, RefusedByJob, WaitTimeout, StoreUnreachable.
        """
        chosen = self.chosen_replicas(replica)
        # Of those that are done or recover already the controller says so, unless others can restart.
        live = [each for each in chosen if each.phase in ("starting", "running")] or chosen
        cycles = {each.id: each.cycle for each in live}
        asked = RestartAsked(request=self.id, by=self.by, cycles=cycles, generation=self.view.generation)
        return [each for each in self.decisions(asked, timeout_s, say) if isinstance(each, RestartOrdered)]

    def drain(
        self, node: str, timeout_s: float, say: Say | None = None, *, force: bool = False
    ) -> list[RestartOrdered]:
        """Have a node's ranks moved to a spare, and give it none any more. Which replicas restart for it; none, where
        it has no ranks to move. Raises as `restart`."""
        self._check(node)
        asked = DrainAsked(request=self.id, by=self.by, node=node, force=force, generation=self.view.generation)
        return [each for each in self.decisions(asked, timeout_s, say) if isinstance(each, RestartOrdered)]

    def undrain(self, node: str, timeout_s: float, say: Say | None = None) -> None:
        """Let a drained node have ranks again. Raises as `restart`."""
        self._check(node)
        self.decisions(
            UndrainAsked(request=self.id, by=self.by, node=node, generation=self.view.generation), timeout_s, say
        )

    def cancel(self, timeout_s: float) -> None:
        """Have the controller end the job, as at a SIGTERM to its batch host; return once it has decided that.

        Raises WaitTimeout, StoreUnreachable.
        """
        # Without a store the job is just ending: then its end in the journal is all that is waited for.
        if (address := self.folder.read_store()) is not None:
            post(address, Signalled(reason="cancel", generation=self.view.generation, by=self.by))
        deadline = self.clock.monotonic() + timeout_s
        while not self.journal.ended:
            # Any shutdown will do: what else ended the job meanwhile has done what was asked for.
            if any(isinstance(record, Shutdown) for record in self.read(LOOK_S)):
                return
            if self.clock.monotonic() > deadline:
                raise WaitTimeout(f"the job's controller has not answered within {seconds(timeout_s)}")

    def wait(self, ordered: list[RestartOrdered], timeout_s: float, say: Say | None = None) -> None:
        """Return once the replicas run again, or the job ends. Raises WaitTimeout, StoreUnreachable."""
        began, said = self.clock.monotonic(), ""
        # A restart ends this cycle: the one after it has to run.
        cycles = {each.replica: each.cycle + 1 for each in ordered}
        while self.view.shutdown is None and not self.journal.ended:
            # A replica in a later cycle than that has failed again since: this restart is over for it.
            late = [
                replica
                for name, cycle in cycles.items()
                if (replica := self.view.replicas[name]).cycle <= cycle
                and replica.phase in ("joining", "stopping", "starting")
            ]
            if not late:
                return
            what = waiting(self.view) or f"{names(each.id for each in late)} does not run yet"
            passed_s = self.clock.monotonic() - began
            if passed_s >= timeout_s:
                raise WaitTimeout(f"after {seconds(timeout_s)} {what}; `status` says how it goes on")
            if say is not None and passed_s >= SAY_AFTER_S and what != said:
                said = what
                say(what)
            self.read(min(LOOK_S, timeout_s - passed_s))

    def _check(self, node: str) -> None:
        if node not in self.view.nodes:
            raise UsageError(f"no node {node!r}: the job has {names(self.view.nodes)}")

    def chosen_replicas(self, replica: str | None) -> list[ReplicaView]:
        """The replica of this name; None: all. Raises UsageError for one that there is not."""
        if replica is not None and replica not in self.view.replicas:
            raise UsageError(f"no replica {replica!r}: the job has {', '.join(self.view.replicas)}")
        return [each for each in self.view.replicas.values() if replica in (None, each.id)]

    def address(self) -> StoreAddress:
        """Where the job's store listens now. Raises UsageError."""
        address = self.folder.read_store()
        if address is None:
            raise UsageError(f"job {self.folder.job_id} has just ended")
        return address

    def decisions(self, asked: AnyFact, timeout_s: float, say: Say | None) -> Sequence[AnyRecord]:
        """Post a request, and wait for what the controller has decided about it."""
        address = self.address()
        deadline, is_said = self.clock.monotonic() + timeout_s, False
        post(address, asked)
        while (left_s := deadline - self.clock.monotonic()) > 0.0:
            records = self.read(min(LOOK_S, left_s))
            for record in records:
                if isinstance(record, RequestRefused) and record.request == self.id:
                    raise RefusedByJob(f"job {self.folder.job_id}: {record.why}")
            # One commit has all that follows from a request: none of it is still to come.
            if answers := [each for each in records if isinstance(each, ANSWERS) and each.request == self.id]:
                return answers
            if self.journal.ended:
                raise UsageError(f"job {self.folder.job_id} has just ended")
            if self.leaves:
                raise KeyboardInterrupt
            if say is not None and not is_said and timeout_s - left_s >= SAY_AFTER_S:
                is_said = True
                say(f"waiting for the controller to answer, up to {seconds(left_s)} more")
        if self.journal.store_error is not None:
            raise StoreUnreachable(f"{self.journal.store_error}; whether request {self.id} arrived is not known")
        raise WaitTimeout(
            f"the job's controller has not answered within {seconds(timeout_s)}; request {self.id} stays in its "
            "inbox, and `events` shows what becomes of it"
        )

    def read(self, wait_s: float) -> list[AnyRecord]:
        """What is new in the journal, once the view has it."""
        return [
            item.record for item in self.journal.poll(wait_s) if isinstance(item, Entry) and fold(self.view, item)
        ]
