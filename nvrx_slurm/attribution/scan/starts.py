"""Where a file's later runs may begin: a requeued job appends to one log, and so does a script that is run again.

A run begins as the one before it did: the first lines of the file come again, but for their numbers. So what a batch
script prints first need not be known. Banners of common launchers are: these suffice alone, but for the first.
"""

from __future__ import annotations

import re
from collections import deque

from nvrx_slurm.attribution.scan.blocks import LogBlock

_FIRST_LINES = 24
_PARTS = 8
_SHORTEST = 10
_LONGEST = 60
_TEXT = re.compile(rb"[^\d\n]+")
_LETTERS = re.compile(rb"[A-Za-z]")
_SAME_START_BYTES = 16 << 10
"""Within this distance the first lines come again together."""

_MOST = 512
"""A text that stands in more places than this is no banner."""


_BANNERS = (
    b"Setting OMP_NUM_THREADS environment variable for each process",
    b"Starting elastic_operator with launch configs",
    b"WORLD INFO DICT: ",
    b"Initializing distributed: GLOBAL_RANK: 0,",
    b"System Information: Jax Version: ",
)


class StartSearch:
    """Finds the places where two or more of a file's first lines come again, near to each other and in order."""

    def __init__(self, head: bytes) -> None:
        """`head`: the beginning of the file's text."""
        self._places: dict[bytes, list[int]] = {}
        self._banners: dict[bytes, list[int]] = {text: [] for text in _BANNERS}
        for line in head.split(b"\n")[:_FIRST_LINES]:
            text = max(_TEXT.findall(line), key=len, default=b"").strip()[:_LONGEST]
            if len(text) >= _SHORTEST and _LETTERS.search(text) and text not in self._places:
                self._places[text] = []
            if len(self._places) == _PARTS:
                break

    def read(self, block: LogBlock) -> None:
        for text, places in (*self._places.items(), *self._banners.items()):
            at = 0
            while len(places) <= _MOST and (at := block.text.find(text, at)) >= 0:
                places.append(block.offset_of(block.bounds(at)[0]))
                at += len(text)

    def starts(self, first_hit: int) -> tuple[int, ...]:
        """Offsets of lines, in order; the file's own beginning is none, and what stands below the first line that a
        rule recognised is no first line."""
        known = [sorted(places) for places in self._places.values() if 0 < len(places) <= _MOST]
        texts = [places[1:] for places in known if places[0] < first_hit]
        found = {offset for banner in self._banners.values() for offset in sorted(banner)[1:]}
        recent: deque[tuple[int, int]] = deque()
        for offset, number in sorted((offset, number) for number, places in enumerate(texts) for offset in places):
            while recent and offset - recent[0][0] > _SAME_START_BYTES:
                recent.popleft()
            # A first line is a start where another one of the first lines follows in their order.
            found.update(other for other, earlier in recent if earlier < number)
            recent.append((offset, number))
        return tuple(sorted(found))
