"""The journal and the heartbeats of a job whose store only processes in another network reach.

`python -m nvrx_slurm.lab.flow.stages.remote_journal FOLDER` reads them there and writes a line for each entry and
each heartbeat; `RemoteJournal` starts it and reads the lines.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import Entry, Heartbeat, JobEnded, JobStarted, Record
from nvrx_slurm.report.model import ReceivedHeartbeat
from nvrx_slurm.report.source import Journal
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.processes import dies_with_parent

POLL_S = 1.0
CHUNK_BYTES = 1 << 16
PROGRAM = (sys.executable, "-P", "-m", "nvrx_slurm.lab.flow.stages.remote_journal")


class JournalLine(Record, frozen=True, kw_only=True):
    """An entry; or else a heartbeat, and when it came."""

    entry: Entry | None = None
    beat: Heartbeat | None = None
    t: float = 0.0


_decoder = msgspec.json.Decoder(JournalLine)


class RemoteJournal:
    """Reads as `report.source.Journal` does, through a process inside; `within`: the words that start one there.

    It has the store's time as far as heartbeats carry it.
    """

    def __init__(self, within: Sequence[str], folder: JobFolder, clock: Clock) -> None:
        self._process = subprocess.Popen(
            [*within, *PROGRAM, str(folder.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            preexec_fn=dies_with_parent(signal.SIGKILL),
        )
        assert self._process.stdout is not None
        # The descriptor is read, not the file: `select` knows nothing of lines that a buffer already holds.
        self._out, self._rest = self._process.stdout.fileno(), b""
        self._clock = clock
        self.ended = False

    def close(self) -> None:
        """End the process inside; once more does no harm."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def poll(self, wait_s: float = 0.0) -> list[Entry | ReceivedHeartbeat]:
        """What is new. If nothing is, waits for it, `wait_s` at most; an empty list may come sooner."""
        if not select.select([self._out], [], [], wait_s)[0]:
            return []
        data = os.read(self._out, CHUNK_BYTES)
        # A read may end within a line: its rest waits for the next one.
        *lines, self._rest = (self._rest + data).split(b"\n")
        found: list[Entry | ReceivedHeartbeat] = []
        for text in lines:
            line = _decoder.decode(text)
            if line.beat is not None:
                found.append(ReceivedHeartbeat(t=line.t, heartbeat=line.beat))
            elif line.entry is not None:
                found.append(line.entry)
                if isinstance(line.entry.record, JobEnded | JobStarted):
                    self.ended = isinstance(line.entry.record, JobEnded)
        if not data:  # the process inside has ended
            self._clock.sleep(wait_s)
        return found

    def catch_up(self) -> list[Entry | ReceivedHeartbeat]:
        """Everything that can be read now."""
        found: list[Entry | ReceivedHeartbeat] = []
        while more := self.poll():
            found += more
        return found

    def store_time(self) -> float | None:
        """The store runs on this machine: it has this process's clock."""
        return self._clock.wall()


def main(folder: str) -> None:
    """Print all that comes, until the reader closes the pipe."""
    journal = Journal(JobFolder(Path(folder)), beats=True, clock=SystemClock())
    while True:
        lines = [
            JournalLine(entry=item) if isinstance(item, Entry) else JournalLine(beat=item.heartbeat, t=item.t)
            for item in journal.poll(POLL_S)
        ]
        for line in lines or [JournalLine()]:  # also without news: it ends here once nothing reads the pipe
            sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1])
