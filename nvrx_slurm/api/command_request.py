"""Running a command beside a rank of a running job: `nvrx-slurm exec`.

The controller journals the request and orders the rank's agent to run it. Its output and its end come through a
stream of the store; this side's words (I am here, so much has arrived, this signal) go through another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from nvrx_slurm.api.user_request import Say, UserRequest, ranks_there_are
from nvrx_slurm.errors import NvrxError, RefusedByJob, StoreUnreachable, UntrustedRecord, UsageError
from nvrx_slurm.journal.commands import KEPT_S, AskerWord, CommandEnd, CommandWord, unpack_command
from nvrx_slurm.journal.folder import JobFolder, StoreAddress
from nvrx_slurm.journal.records import CommandAsked, CommandOrdered, NodeLeft, NodeLost
from nvrx_slurm.report.journal_stream import answered, connect
from nvrx_slurm.report.words import seconds
from nvrx_slurm.store.keys import Keys
from nvrx_slurm.store.sealing import RefusedRecords, field_m, open_order, seal_order
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.job_key import JobKey

# Takes a piece of output; the flag: it is of standard error.
Out = Callable[[bytes, bool], None]

# How often this side says that it is there: until the command has begun, it begins with the next word.
ALIVE_S = 1.0
BEGIN_S = 0.1

# The agent posts a word at least every 2 s while the command runs: several in a row are missing by then.
AGENT_GONE_S = 15.0
# Every agent of the job reads the order.
MOST_ARGUMENT_BYTES = 64 << 10


class CommandStream:
    """A user's end of the two streams of a command (`journal/commands.py`). Every method raises StoreUnreachable
    where the store does not answer."""

    def __init__(self, address: StoreAddress, request: str) -> None:
        self._where, self._key = address.url, JobKey(address.token)
        keys = Keys(address.job)
        self._in, self._out = keys.command_in(request), keys.command_out(request)
        self._redis = connect(address)
        self._refused = RefusedRecords(SystemClock())
        # From the beginning: the agent may post its first word before this side reads.
        self._after: str | bytes = "0-0"
        self._said = 0
        self.passed = 0
        """The number of the last word that was read."""

    def close(self) -> None:
        self._redis.close()

    def say(self, word: AskerWord) -> None:
        """Post a word to the agent."""
        self._said += 1
        sealed = seal_order(self._key, self._in, word, self._said)

        def send() -> None:
            self._redis.xadd(self._in, {"m": sealed}, maxlen=KEPT_S)
            self._redis.expire(self._in, KEPT_S)

        answered(self._where, send)

    def read(self, wait_s: float) -> list[CommandWord]:
        """The agent's words that are new, in order; waits up to `wait_s` for one."""
        # Redis takes a BLOCK of 0 for no bound at all.
        block_ms = max(1, int(wait_s * 1000))
        reply = answered(self._where, lambda: self._redis.xread({self._out: self._after}, block=block_ms))
        words = []
        for _, items in reply or ():
            for identity, fields in items:
                self._after = identity
                try:
                    self.passed, packed = open_order(self._key, self._out, field_m(fields), self.passed)
                    words.append(unpack_command(packed))
                except UntrustedRecord as error:
                    self._refused.add(self._out, identity, error)
        return words


class CommandRequest(UserRequest):
    """One command. Raises as `UserRequest`."""

    def __init__(self, folder: JobFolder) -> None:
        super().__init__(folder)
        self.signals: list[int] = []
        """Those that the command is to get: a signal handler may add to it."""
        self.has_begun = False

    def run(
        self, argv: Sequence[str], rank: int, replica: str | None, out: Out, timeout_s: float, say: Say | None = None
    ) -> CommandEnd | None:
        """Run it, and return how it ended; None: the user has left. `timeout_s`: for the controller's answer.

        Raises UsageError for a rank that has no worker and for an argument that is not UTF-8, RefusedByJob,
        WaitTimeout, StoreUnreachable, and NvrxError where the agent is lost meanwhile.
        """
        try:
            size = sum(len(each.encode()) for each in argv)
        except UnicodeEncodeError as error:  # Python has a byte that is not UTF-8 as half of a surrogate pair
            raise UsageError(
                f"the argument {error.object[:100]!r} is not UTF-8, and a request can carry nothing else: put the "
                "command into a script"
            ) from None
        if size > MOST_ARGUMENT_BYTES:
            raise UsageError(f"the command is longer than {MOST_ARGUMENT_BYTES >> 10} KiB: put it into a script")
        replicas = self.chosen_replicas(replica)
        having = [each for each in replicas if 0 <= rank < each.world_size]
        if len(having) > 1:
            several = ", ".join(each.id for each in having)
            raise UsageError(f"several replicas have a rank {rank}: choose one of {several} by --replica")
        if not having:
            raise UsageError(f"no rank {rank}: {ranks_there_are(self.view.replicas.values())}")
        place = having[0]
        asked = CommandAsked(
            request=self.id,
            by=self.by,
            argv=tuple(argv),
            replica=place.id,
            rank=rank,
            cycle=place.cycle,
            generation=self.view.generation,
        )
        (ordered,) = (each for each in self.decisions(asked, timeout_s, say) if isinstance(each, CommandOrdered))
        stream = CommandStream(self.address(), self.id)
        try:
            return self._follow(stream, ordered, out)
        finally:
            # Without it the agent kills the command all the same, once it has heard nothing for `ASKER_GONE_S`.
            with contextlib.suppress(StoreUnreachable):
                stream.say(AskerWord(gone=True))
            stream.close()

    def _follow(self, stream: CommandStream, ordered: CommandOrdered, out: Out) -> CommandEnd | None:
        heard_at, said_at, taken = self.clock.monotonic(), 0.0, 0
        while not self.leaves:
            now = self.clock.monotonic()
            # At once for a signal, and for what was taken: the agent sends no more than `WINDOW` pieces ahead.
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
            # The journal may report the loss of the node long before the agent has been silent for long enough.
            for record in self.read(0.0):
                if isinstance(record, NodeLost | NodeLeft) and record.node == ordered.node:
                    raise NvrxError(f"{ordered.node} is gone, and the command with it; `status` shows why")
            if self.clock.monotonic() - heard_at > AGENT_GONE_S:
                raise NvrxError(f"the agent of {ordered.node} has said nothing for {seconds(AGENT_GONE_S)}")
        return None
