"""The rings that a reader on the same node has attached to. That one can be attached to is what makes a node the
same."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from nvrx_slurm.transport.errors import ForeignRing, RingError
from nvrx_slurm.transport.ring import SharedRing, is_gone
from nvrx_slurm.util.log import get_logger

MOST_RINGS = 64
MOST_ELSEWHERE = 4096
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_log = get_logger("transport")


class LocalRings(Mapping[str, SharedRing]):
    """Ring by name, attached at its first use. One whose producer has died goes when another ring is attached to, and
    one that nobody has used for longest when there are too many: what is mapped takes memory that no one else
    gets."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._attached: OrderedDict[str, SharedRing] = OrderedDict()
        self._elsewhere: OrderedDict[str, str] = OrderedDict()
        self._has_warned = False
        self._is_closed = False

    def has(self, name: str) -> bool:
        """Whether the ring is on this node; attaches to it."""
        return name in self._attached or (name not in self._elsewhere and self._attach(name) is not None)

    def why_not(self, name: str) -> str:
        """Why the ring was not attached to; "" where that is not known."""
        return self._elsewhere.get(name, "")

    def attached(self, name: str) -> SharedRing | None:
        """The ring, if it has been attached to."""
        ring = self._attached.get(name)
        if ring is not None and len(self._attached) > 1:
            with contextlib.suppress(KeyError):  # it is being let go
                self._attached.move_to_end(name)
        return ring

    def __getitem__(self, name: str) -> SharedRing:
        """Attached again where it has just been let go: whoever asks was told that it is here."""
        ring = self._attached.get(name) or self._attach(name)
        if ring is None:
            raise KeyError(name)
        return ring

    def __iter__(self) -> Iterator[str]:
        """Of a copy: a read in another thread changes their order."""
        return iter(list(self._attached))

    def __len__(self) -> int:
        return len(self._attached)

    def close(self) -> None:
        with self._guard:
            self._is_closed = True
            for ring in list(self._attached.values()):
                ring.close()
            self._attached.clear()

    def after_fork(self) -> None:
        """In the child: the memory is the same, but a lock may have been somebody's."""
        self._guard = threading.Lock()

    def _attach(self, name: str) -> SharedRing | None:
        with self._guard:
            if self._is_closed or name in self._attached:
                return self._attached.get(name)
            try:
                ring = SharedRing.attach(name)
            except RingError as error:
                is_news = isinstance(error, ForeignRing) and not self._has_warned
                self._has_warned |= is_news
                _log.log(
                    logging.WARNING if is_news else logging.DEBUG, "%s is read over the network: %s", name, error
                )
                if not _may_pass(error):
                    self._elsewhere[name] = error.said
                if len(self._elsewhere) > MOST_ELSEWHERE:
                    self._elsewhere.popitem(last=False)
                return None
            self._let_go()
            self._attached[name] = ring
            return ring

    def _let_go(self) -> None:
        """Not closed: its memory goes when the last read that is under way has ended."""
        gone = [name for name in self if is_gone(name)]
        crowd = len(self._attached) - len(gone) - MOST_RINGS + 1
        gone += [name for name in list(self)[: max(crowd, 0)] if name not in gone]
        for name in gone:
            del self._attached[name]


def _may_pass(error: RingError) -> bool:
    """Whether this process has too much open just now, which says nothing of the ring."""
    return isinstance(error.__context__, OSError) and error.__context__.errno in _EXHAUSTED
