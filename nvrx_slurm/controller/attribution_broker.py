"""The attribution broker: one process beside the controller that asks the sources, so that reading gigabytes of logs
never delays a decision.

It is started when first needed, dies with the controller, and is started again when it dies; a request that it had
not answered is sent again. Both ends write lines of JSON: the controller `{"ask": …}`, `{"settled": …}`,
`{"judged": …}`, `{"found": …}`, the broker `{"answer": …}`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from nvrx_slurm.errors import MalformedRecord
from nvrx_slurm.jobspec import env
from nvrx_slurm.journal.verdicts import AgentFindings, Attribution, FailureKey, Inquiry, VerdictRecord
from nvrx_slurm.util.decoding import decode
from nvrx_slurm.util.files import open_log
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import dies_with_parent, send_signal

log = get_logger("controller")

# A broker that dies so often in a row is not started again: the failures that it was asked about get no verdict.
MOST_STARTS = 5

# A broker that lived this long does not count as a failed start: a job of weeks may lose one now and then.
STABLE_S = 60.0

# Before it is started again, after so many failed starts: the host may have recovered by then.
PAUSES_S = (0.0, 0.0, 0.1, 0.5, 2.0)

# How long a broker may take to end once it has closed its output.
DIES_S = 2.0

# A broker that has answered nothing for so long hangs, as its sources all have bounds. It is killed at the next
# request.
SILENT_S = 900.0

LINE_BYTES = 4 << 20
# Of agents, kept while the broker starts: of the nodes that are left out the source reads the logs itself.
MOST_FINDINGS = 1024

Answered = Callable[[FailureKey, Attribution], None]


class AttributionBroker(Protocol):
    """Asks the sources. No call waits, and a failure of the broker raises nothing here."""

    def open(self) -> None:
        """Get ready: a request will follow soon."""
        ...

    def ask(self, inquiry: Inquiry, *, settled: bool) -> None:
        """Ask every source, once for a key. `settled`: all workers of the cycle are gone, so its logs are whole."""
        ...

    def settled(self, key: FailureKey) -> None: ...
    def judged(self, judged: VerdictRecord) -> None: ...

    def found(self, findings: AgentFindings) -> None:
        """What an agent has found in the logs of its ranks."""
        ...

    async def close(self, within_s: float) -> None:
        """Let it deliver its messages, up to `within_s`; then kill it."""
        ...


def _line(message: dict[str, Any]) -> bytes:
    return msgspec.json.encode(message) + b"\n"


class _BrokerReply(msgspec.Struct):
    key: FailureKey
    attribution: Attribution


class _Line(msgspec.Struct):
    answer: _BrokerReply


_lines = msgspec.json.Decoder(_Line)


def _answer(line: bytes) -> _BrokerReply:
    answer = _lines.decode(line).answer
    msgspec.msgpack.encode(answer.attribution)  # the journal takes no number beyond 64 bits
    return answer


class AttributionBrokerProcess:
    """`python -m nvrx_slurm.attribution`, in the job's environment."""

    def __init__(self, log_path: Path, answered: Answered) -> None:
        self._log_path, self._answered = log_path, answered
        self._process: Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._starts = 0
        self._open: dict[FailureKey, Inquiry] = {}
        self._settled: set[FailureKey] = set()
        self._unsent: list[bytes] = []
        self._findings: deque[bytes] = deque(maxlen=MOST_FINDINGS)  # that came before it was up
        self._closing = False
        self._waiting_since: float | None = None  # the first request since its last answer

    def open(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._keep())

    def ask(self, inquiry: Inquiry, *, settled: bool) -> None:
        # Asked before the cause was known: what is said of another rank of the same failure does not count.
        key = inquiry.key
        for old in [each for each in self._open if each != key == msgspec.structs.replace(each, rank=key.rank)]:
            del self._open[old]
            self._settled.discard(old)
        self._open[key] = inquiry
        now = asyncio.get_running_loop().time()
        if self._waiting_since is None:
            self._waiting_since = now
        elif self._process is not None and now - self._waiting_since > SILENT_S:
            silent_s, self._waiting_since = now - self._waiting_since, now
            log.error("the attribution broker has answered nothing for %.0f s; it is killed", silent_s)
            send_signal(self._process, signal.SIGKILL)
        if settled:
            self._settled.add(inquiry.key)
        self._say({"ask": inquiry, "settled": settled})

    def settled(self, key: FailureKey) -> None:
        if key in self._open:
            self._settled.add(key)
            self._say({"settled": key})

    def found(self, findings: AgentFindings) -> None:
        self._say({"found": findings})

    def judged(self, judged: VerdictRecord) -> None:
        inquiry, settled = self._open.pop(judged.key, None), judged.key in self._settled
        self._settled.discard(judged.key)
        if inquiry is not None and not self._is_up:
            self._unsent.append(_line({"ask": inquiry, "settled": settled}))  # the verdict alone names no failure
        self._say({"judged": judged})

    async def close(self, within_s: float) -> None:
        self._closing = True
        if self._task is None:
            return
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        await asyncio.wait([self._task], timeout=within_s)
        self._task.cancel()
        if self._process is not None and self._process.returncode is None:
            send_signal(self._process, signal.SIGKILL)

    def _say(self, message: dict[str, Any]) -> None:
        self.open()
        if self._task is not None and self._task.done():  # it is not started any more
            self._unsent = []
            self._findings.clear()
        elif self._process is not None and self._process.stdin is not None and self._is_up:
            self._process.stdin.write(_line(message))
        elif "judged" in message:  # the rest need not be kept: the next broker is asked all that is open
            self._unsent.append(_line(message))
        elif "found" in message:
            self._findings.append(_line(message))

    @property
    def _is_up(self) -> bool:
        stdin = self._process.stdin if self._process is not None else None
        return stdin is not None and not stdin.is_closing()

    # ---- the process

    async def _keep(self) -> None:
        while not self._closing and self._starts < MOST_STARTS:
            self._starts += 1
            began = asyncio.get_running_loop().time()
            try:
                process = await self._start()
            except (OSError, RuntimeError) as error:  # no process can be started now, or no thread that waits for it
                log.error("the attribution broker cannot be started: %s", error)
            else:
                await self._read_answers(process)
                # A broker that has closed its output and does not exit is killed: else the next is never started.
                ending = asyncio.ensure_future(process.wait())
                await asyncio.wait([ending], timeout=None if self._closing else DIES_S)
                if not ending.done():
                    send_signal(process, signal.SIGKILL)
                code = await ending
                self._process = None
                if not self._closing:
                    log.warning("the attribution broker ended (%s); see %s", code, self._log_path)
            if asyncio.get_running_loop().time() - began > STABLE_S:
                self._starts = 0
            if not self._closing and self._starts < MOST_STARTS:
                await asyncio.sleep(PAUSES_S[self._starts])

    async def _start(self) -> Process:
        with os.fdopen(open_log(self._log_path), "ab") as errors, env.handed_on() as (variables, descriptors):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "nvrx_slurm.attribution"),
                env=env.child_environment(variables),
                stdin=PIPE,
                stdout=PIPE,
                stderr=errors,
                pass_fds=descriptors,
                limit=LINE_BYTES,
                start_new_session=True,
                preexec_fn=dies_with_parent(signal.SIGKILL),
            )
        assert process.stdin is not None
        # Questions first: findings and verdicts are about them.
        asks = [_line({"ask": inquiry, "settled": key in self._settled}) for key, inquiry in self._open.items()]
        process.stdin.writelines([*asks, *self._findings, *self._unsent])
        self._unsent = []
        self._findings.clear()
        self._process = process
        return process

    async def _read_answers(self, process: Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # longer than any answer is
                log.error("the attribution broker has sent a line of more than %d bytes; it is killed", LINE_BYTES)
                send_signal(process, signal.SIGKILL)
                return
            if not line:
                return
            self._waiting_since = None
            try:
                answer = decode(_answer, line, "the line")
            except MalformedRecord as error:
                log.error("the attribution broker has sent what is no answer (%s): %.200r", error, line)
                continue
            self._answered(answer.key, answer.attribution)
