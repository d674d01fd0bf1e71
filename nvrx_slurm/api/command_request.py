"""Running a command beside a rank of a running job: `nvrx-slurm exec`.

The controller journals the request and orders the rank's agent to run it. Its output and its end come through a
stream of the store; this side's words (I am here, so much has arrived, this signal) go through another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from nvrx_slurm.api.user_request import Say, UserRequest
from nvrx_slurm.errors import NvrxError, RefusedByJob, StoreUnreachable, UsageError
from nvrx_slurm.journal.commands import AskerWord, CommandEnd
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import CommandAsked, CommandOrdered, NodeLeft, NodeLost
from nvrx_slurm.report.command_stream import CommandStream
from nvrx_slurm.report.words import numbers, seconds
from nvrx_slurm.util.clock import Clock

Out = Callable[[bytes, bool], None]
"""Takes a piece of output; the flag: it is of standard error."""

ALIVE_S = 1.0
BEGIN_S = 0.1
"""How often this side says that it is there: until the command has begun, it begins with the next word."""

AGENT_GONE_S = 15.0
MOST_ARGUMENT_BYTES = 64 << 10
"""Every agent of the job reads the order."""


class CommandRequest(UserRequest):
    """One command. Raises as `UserRequest`."""

    def __init__(self, folder: JobFolder, *, clock: Clock | None = None) -> None:
        super().__init__(folder, clock=clock)
        self.signals: list[int] = []
        """Those that the command is to get: a signal handler may add to it."""
        self.has_begun = False

    def run(
        self, argv: Sequence[str], rank: int, replica: str | None, out: Out, timeout_s: float, say: Say | None = None
    ) -> CommandEnd | None:
        """Run it, and return how it ended; None: the user has left. `timeout_s`: for the controller's answer.

        Raises UsageError for a rank that has no worker, RefusedByJob, WaitTimeout, StoreUnreachable, and NvrxError
        where the agent is lost meanwhile.
        """
        if sum(len(each.encode(errors="surrogateescape")) for each in argv) > MOST_ARGUMENT_BYTES:
            raise UsageError(f"the command is longer than {MOST_ARGUMENT_BYTES >> 10} KiB: put it into a script")
        place = self._replica_of(rank, replica)
        asked = CommandAsked(
            request=self.id,
            by=self.by,
            argv=tuple(argv),
            replica=place,
            rank=rank,
            cycle=self.view.replicas[place].cycle,
            generation=self.view.generation,
        )
        (ordered,) = (each for each in self.answers(asked, timeout_s, say) if isinstance(each, CommandOrdered))
        address = self.folder.read_store()
        if address is None:
            raise UsageError(f"job {self.folder.job_id} has just ended")
        stream = CommandStream(address, self.id)
        try:
            return self._follow(stream, ordered, out)
        finally:
            with contextlib.suppress(StoreUnreachable):
                stream.say(AskerWord(gone=True))
            stream.close()

    def _follow(self, stream: CommandStream, ordered: CommandOrdered, out: Out) -> CommandEnd | None:
        heard_at, said_at, taken = self.clock.monotonic(), 0.0, 0
        while not self.leaves:
            now = self.clock.monotonic()
            if self.signals or taken or now - said_at >= (ALIVE_S if self.has_begun else BEGIN_S):
                number = self.signals.pop(0) if self.signals else 0
                stream.say(AskerWord(taken=stream.passed, signal=number))
                said_at, taken = now, 0
            for word in stream.read(ALIVE_S / 2 if self.has_begun else BEGIN_S):
                self.has_begun, heard_at, taken = True, self.clock.monotonic(), taken + 1
                if word.data:
                    out(word.data, word.is_error)
                if word.over is not None:
                    if word.over.error is not None:
                        raise RefusedByJob(f"{ordered.node}: {ordered.argv[0]}: {word.over.error}")
                    return word.over
            for record in self.read(0.0):
                if isinstance(record, NodeLost | NodeLeft) and record.node == ordered.node:
                    raise NvrxError(f"{ordered.node} is gone, and the command with it; `status` shows why")
            if self.clock.monotonic() - heard_at > AGENT_GONE_S:
                raise NvrxError(f"the agent of {ordered.node} has said nothing for {seconds(AGENT_GONE_S)}")
        return None

    def _replica_of(self, rank: int, replica: str | None) -> str:
        known = self.view.replicas
        if replica is not None and replica not in known:
            raise UsageError(f"no replica {replica!r}: the job has {', '.join(known)}")
        having = [each.id for each in known.values() if replica in (None, each.id) and 0 <= rank < each.world_size]
        if len(having) > 1:
            raise UsageError(f"several replicas have a rank {rank}: choose one of {', '.join(having)} by --replica")
        if not having:
            there = "; ".join(f"{each.id} has ranks {numbers(range(each.world_size))}" for each in known.values())
            raise UsageError(f"no rank {rank}: {there}")
        return having[0]
