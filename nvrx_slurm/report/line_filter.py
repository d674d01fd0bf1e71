"""Which lines of the ranks' output are shown: those that match, and those since a moment.

The output has no times of its own. A line that begins with a time stamp has that time, and so have the lines of the
same rank after it. Of a file without stamps all is shown that is read, if it was written to since then: from the mark
that the agent has made (`output_times.py`), and where there is none from its beginning.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace

from nvrx_slurm.attribution.scan.prefixes import first_stamp, label_of, stamp_of
from nvrx_slurm.report.logs import Chunk, RankLog

HEAD_BYTES = 64 << 10
# A line that is longer is judged, and shown, in pieces of this size.
LONGEST_LINE_BYTES = 1 << 20


class LineFilter:
    """Passes on whole lines that match `pattern`, from the moment `since` on. `is_untimed`: some were passed on
    although no time is known of them."""

    def __init__(
        self, *, pattern: re.Pattern[bytes] | None, since: float | None, marked: Collection[RankLog] = ()
    ) -> None:
        """`marked`: files that are read from the moment on, or nearly so."""
        self._pattern, self._since, self._marked = pattern, since, marked
        self._partial: dict[RankLog, bytes] = {}
        self._shown: dict[tuple[RankLog, int | None], bool] = {}
        self._begins: dict[RankLog, tuple[bool, float]] = {}
        self.is_untimed = False

    def feed(self, chunk: Chunk) -> Iterator[Chunk]:
        """What of this chunk is shown."""
        *lines, partial = (self._partial.get(chunk.file, b"") + chunk.data).split(b"\n")
        if len(partial) > LONGEST_LINE_BYTES:
            lines, partial = [*lines, partial], b""
        self._partial[chunk.file] = partial
        if data := b"".join(line + b"\n" for line in lines if self._is_shown(chunk.file, line)):
            yield replace(chunk, data=data)

    def rest(self) -> Iterator[Chunk]:
        """The last lines, which have no newline."""
        for file, line in sorted(self._partial.items()):
            if line and self._is_shown(file, line):
                yield Chunk(file, line)
        self._partial.clear()

    def caught_up(self) -> None:
        """Lines that come from now on are new, with any stamp."""
        self._since = None

    def _is_shown(self, file: RankLog, line: bytes) -> bool:
        return self._is_since(file, line) and (self._pattern is None or self._pattern.search(line) is not None)

    def _is_since(self, file: RankLog, line: bytes) -> bool:
        if self._since is None:
            return True
        if file not in self._begins:
            # A stamp without a year is the last such date before this moment.
            changed_at = file.path.stat().st_mtime
            begins = changed_at >= self._since
            if begins:
                with file.path.open("rb") as source:
                    head = source.read(HEAD_BYTES).split(b"\n")
                first = first_stamp((each[label_of(each, srun=False).begin :] for each in head), changed_at)
                if first is None:
                    self.is_untimed |= file not in self._marked
                else:
                    begins = first >= self._since
            self._begins[file] = begins, changed_at
        begins, changed_at = self._begins[file]
        label = label_of(line, srun=False)
        key = (file, label.rank)
        if (stamp := stamp_of(line[label.begin :], changed_at)) is not None:
            self._shown[key] = stamp >= self._since
        # A line without a stamp, of a traceback say, belongs to the last line of its rank that has one.
        return self._shown.get(key, begins)
