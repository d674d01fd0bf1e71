"""The open sections of this process, and the names that it gave them, in the memory it shares with its agent."""

from __future__ import annotations

import os
from _thread import get_native_id  # `threading` would be loaded for the sake of this one function
from time import monotonic_ns

from nvrx_slurm.workload.layout import (
    COUNT,
    ENTRY_WORDS,
    LARGEST,
    MAIN_OPEN,
    MAIN_THREAD,
    NAME_BYTES,
    NAME_WORDS,
    OPEN,
    OPEN_END,
    OTHERS,
    OWNER,
    ROW_COUNT,
    SEAL,
    SIGN,
    STARTED,
    TIMEOUT,
    WHAT,
    name_in,
    row_at,
)
from nvrx_slurm.workload.progress import in_main_section, shared_words, silence_ends, slot_path


class Board:
    """This process's side of the table of names and the entries. `list.pop` and `dict.setdefault` are atomic."""

    def __init__(self, words: memoryview) -> None:
        self.words = words
        self.free_entries = list(range(OPEN, OPEN_END, ENTRY_WORDS))
        names = {row: name_in(words, row) for row in range(ROW_COUNT - 1)}  # of an earlier process of this worker
        self.rows = {name: row for row, name in names.items() if name}
        self.free_rows = [row for row, name in names.items() if not name][::-1]
        if words[OWNER] != os.getpid():  # its entries are void as their seals are; threads that race here: once
            words[MAIN_OPEN] = 0
            words[OWNER] = os.getpid()

    def row_of(self, name: str) -> int:
        """The name's row, a new one if it has none; the last one once no row is free."""
        row = self.rows.get(name)
        if row is not None:
            return row
        # No lock: another thread may look for the same name meanwhile. Each writes a row of its own, `setdefault`
        # lets one of them win, and the other gives its row back.
        try:
            fresh = self.free_rows.pop()
        except IndexError:
            self._write(ROW_COUNT - 1, OTHERS)
            return ROW_COUNT - 1
        self._write(fresh, name)  # before another thread can find it
        row = self.rows.setdefault(name, fresh)
        if row != fresh:
            self._write(fresh, "")
            self.free_rows.append(fresh)
        return row

    def keep(self, row: int, took_ns: int) -> None:
        """A section of this name has ended well; the agent looks too seldom to see for itself how long it took."""
        at = row_at(row)
        if took_ns > self.words[at + LARGEST]:
            self.words[at + LARGEST] = took_ns
        self.words[at + COUNT] += 1

    def _write(self, row: int, name: str) -> None:
        at = row_at(row)
        self.words[at : at + NAME_WORDS] = memoryview(name.encode().ljust(NAME_BYTES, b"\0")).cast("q")


class Opened:
    """One section that is open. Without an entry, where all are taken, it is not watched.

    A signal handler may raise (Ctrl-C) in any call, so there is no call between two stores that belong together. A
    section that was left without its end, as in a dropped coroutine, ends when it is deleted: else it would be taken
    for a hang later.
    """

    __slots__ = ("board", "entry", "main", "over", "row", "started", "thread")

    def __init__(self, board: Board) -> None:
        self.board, self.entry, self.main, self.over, self.thread = board, -1, False, False, get_native_id()

    def publish(self, name: str, timeout_ns: int) -> None:
        words = self.board.words
        self.row = self.board.row_of(name)
        main = self.thread == os.getpid()
        self.started = monotonic_ns()
        if main:
            silence_ends(words, self.started)
            self.main = main
            in_main_section.add(self.started)
            words[MAIN_OPEN] = len(in_main_section)
        try:
            self.entry = at = self.board.free_entries.pop()
        except IndexError:
            return
        what = self.row + (MAIN_THREAD if main else 0)
        words[at + TIMEOUT] = timeout_ns
        words[at + WHAT] = what
        words[at + SEAL] = self.started ^ timeout_ns ^ what ^ words[OWNER]
        # Last: from here on the entry is open. The worker may be killed between any two of these stores.
        words[at + STARTED] = self.started

    def end(self, *, succeeded: bool) -> None:
        """Free the entry. How long it took is kept only of one that ended well."""
        if self.over or self.board is not _boards.get(_CURRENT):
            return  # the latter: in a child that was forked inside of it
        words, now, at = self.board.words, monotonic_ns(), self.entry
        if self.main:
            # The sign first: a reader that finds the entry free then finds the sign too, and sees no long silence.
            words[SIGN] = now
            in_main_section.discard(self.started)
            words[MAIN_OPEN] = len(in_main_section)
        if at >= 0:
            words[at + STARTED] = 0
            self.entry = -1
            self.board.free_entries.append(at)
        self.over = True
        if succeeded:
            self.board.keep(self.row, now - self.started)

    def __del__(self) -> None:
        self.end(succeeded=False)


_CURRENT = "current"
_boards: dict[str, Board | None] = {}


def board() -> Board | None:
    """The table of this process's sections; None if it has none."""
    try:
        return _boards[_CURRENT]
    except KeyError:
        return _boards.setdefault(_CURRENT, _claim())


def _claim() -> Board | None:
    """This process's table, if it is the first of its worker that opens a section."""
    # Two processes would overwrite each other's entries, so one of them locks the file for as long as it lives.
    # The mapping before the lock: a record lock ends when its process closes any other descriptor of the slot.
    words, path = shared_words(), slot_path()
    if words is None or path is None:
        return None
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # It ends with the process, so a successor gets it; forked children do not keep it.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return Board(words)


def _disown() -> None:
    """In a forked child: what it opens and closes is not reported, and what its parent opened it does not close."""
    _boards[_CURRENT] = None


os.register_at_fork(after_in_child=_disown)
