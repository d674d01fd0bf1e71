"""What the workers print: raw into a file per rank and cycle, and line by line, prefixed, into the job's log.

One thread reads the workers' pipes, and opens and writes the files; another writes the job's log. A slow file system
can block workers that print (a full pipe blocks, as it does everywhere) but never the agent's loop. A slow job log
blocks no worker: the oldest lines that wait for it are dropped, and their place is marked.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import threading
from collections import deque
from pathlib import Path

import msgspec

from nvrx_slurm.agent.peers import TAIL_BYTES
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.files import open_log, write_all
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.output_times import TimeMarks

log = get_logger("agent")

CHUNK_BYTES = 1 << 16
LONGEST_LINE_BYTES = 16 << 10
QUEUED_CHUNKS = 4096

# What a slow job log gets in the last quarter of the time for the end, a second at most: so many of the chunks left.
LAST_CHUNKS, LAST_S = 16, 1.0

# No descriptor, so each write fails. /dev/null would need one, and this process may have none left.
NO_FILE = -1

CUT = b"... %d chunks of output are not in this log; the ranks' own files have them\n"


class _Source(msgspec.Struct):
    pipe: int
    file: int
    prefix: bytes
    rank: int
    times: TimeMarks
    partial: bytearray = msgspec.field(default_factory=bytearray)


class Output:
    """Captures any number of pipes. Thread-safe; `close` waits for what is still in the pipes."""

    def __init__(self, job_log: int | None, clock: Clock) -> None:
        self._clock = clock
        self._last: dict[int, float] = {}
        self._tails: dict[int, bytes] = {}  # rank → the end of what it has printed
        self._lines = deque[bytes]()
        self._dropped = 0  # of the oldest, since the last that was written
        self._most_lines = QUEUED_CHUNKS
        self._lines_end = False
        self._lines_change = threading.Condition()
        self._open = 0
        self._drained = threading.Event()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._new: queue.SimpleQueue[tuple[int, Path, str, int]] = queue.SimpleQueue()
        self._job_log = job_log
        self._reader = threading.Thread(target=self._read, name="output-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="output-writer", daemon=True)
        self._reader.start()
        self._writer.start()

    def capture(self, path: Path, prefix: str, rank: int = 0) -> int:
        """The write end of a new pipe, whose contents go to `path` (appended, its folder made) and, prefixed, to the
        job's log."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read_end, False)
        self._tails.pop(rank, None)
        # Here too: until the reading thread has seen the new pipe, `wait_drained` would answer for earlier workers.
        self._drained.clear()
        self._new.put((read_end, path, prefix, rank))
        self._wake()
        return write_end

    def last_at(self, rank: int) -> float | None:
        """When the rank last printed anything, on the monotonic clock; None: it has not."""
        return self._last.get(rank)

    def last_lines(self, rank: int) -> str:
        """The end of what the rank has printed, 4 KiB at most, as far as it has been read."""
        return self._tails.get(rank, b"").decode(errors="replace")

    def wait_drained(self, timeout_s: float) -> bool:
        """Block until all pipes are closed by those who write into them, and their files hold all of it. False: time
        is up."""
        return self._drained.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Read and write what is left, up to `timeout_s`, then stop."""
        last_s = min(LAST_S, timeout_s / 4)
        until = self._clock.monotonic() + timeout_s - last_s
        self._closing = True
        self._wake()
        self._reader.join(timeout_s - last_s)
        with self._lines_change:
            self._lines_end = True
            self._lines_change.notify()
        self._writer.join(max(0.0, until - self._clock.monotonic()))
        with self._lines_change:
            self._keep(LAST_CHUNKS)
        self._writer.join(last_s)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    # ---- the reading thread

    def _read(self) -> None:
        while not (self._closing and self._open == 0 and self._new.empty()):
            for key, _ in self._selector.select():
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                else:
                    self._read_source(key.data)
            while not self._new.empty():
                pipe, path, prefix, rank = self._new.get()
                self._open += 1
                self._drained.clear()
                try:
                    file = open_log(path)  # in this thread: open(2) waits for a file system that does not answer
                except OSError as error:  # the worker runs without the file
                    log.error("%s: %s; what is printed there is not kept", path, error.strerror)
                    file = NO_FILE
                source = _Source(pipe, file, prefix.encode(), rank, TimeMarks(path, file))
                self._selector.register(pipe, selectors.EVENT_READ, source)
            if not self._open:
                self._drained.set()

    def _read_source(self, source: _Source) -> None:
        try:
            data = os.read(source.pipe, CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            if source.partial:
                self._queue(source.prefix, bytes(source.partial))
            self._selector.unregister(source.pipe)
            os.close(source.pipe)
            self._open -= 1
            with contextlib.suppress(OSError):  # NFS says only now that what was written late did not fit
                os.close(source.file)
            with contextlib.suppress(OSError):
                source.times.close()
            return
        now = self._last[source.rank] = self._clock.monotonic()
        source.times.note(now, self._clock.wall())
        tail = data[-TAIL_BYTES:]
        if len(tail) < TAIL_BYTES:
            tail = (self._tails.get(source.rank, b"") + tail)[-TAIL_BYTES:]
        self._tails[source.rank] = tail
        _write_or_lose(source.file, data)
        source.partial += data
        # The job's log gets whole lines. One without an end, as a progress bar, is cut: it must not fill the memory.
        end = source.partial.rfind(b"\n") + 1
        if not end and len(source.partial) > LONGEST_LINE_BYTES:
            end = len(source.partial)
        if end:
            self._queue(source.prefix, bytes(source.partial[:end]))
            del source.partial[:end]

    def _queue(self, prefix: bytes, lines: bytes) -> None:
        text = b"".join(prefix + line + b"\n" for line in lines.splitlines())
        with self._lines_change:
            self._lines.append(text)
            self._keep(self._most_lines)
            self._lines_change.notify()

    def _keep(self, chunks: int) -> None:
        """Of those that wait for the job's log the newest, from now on."""
        self._most_lines = chunks
        while len(self._lines) > chunks:
            self._lines.popleft()
            self._dropped += 1

    # ---- the writing thread

    def _write(self) -> None:
        while True:
            with self._lines_change:
                self._lines_change.wait_for(lambda: self._lines or self._lines_end)
                if not self._lines:
                    return
                text = self._lines.popleft()
                if self._dropped:
                    text = CUT % self._dropped + text
                    self._dropped = 0
            if self._job_log is not None:
                _write_or_lose(self._job_log, text)


def _write_or_lose(descriptor: int, data: bytes) -> None:
    """Write, and on a full disk or a closed log lose this piece rather than the worker that printed it."""
    with contextlib.suppress(OSError):
        write_all(descriptor, data)
