"""The rings that a reader on the same node has attached to. That one can be attached to is what makes a node the
same."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from nvrx_slurm.log import get_logger
from nvrx_slurm.transport.errors import RingError
from nvrx_slurm.transport.ring import SharedRing, is_gone

MOST_RINGS = 64
MOST_ELSEWHERE = 4096

_log = get_logger("transport")


class LocalRings(Mapping[str, SharedRing]):
    """Ring by name, attached at its first use. One whose producer has died goes when another ring is attached to, and
    one that nobody has used for longest when there are too many: what is mapped takes memory that no one else
    gets."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._attached: OrderedDict[str, SharedRing] = OrderedDict()
        self._elsewhere: OrderedDict[str, None] = OrderedDict()

    def has(self, name: str) -> bool:
        """Whether the ring is on this node; attaches to it."""
        return name in self._attached or (name not in self._elsewhere and self._attach(name))

    def attached(self, name: str) -> SharedRing | None:
        """The ring, if it has been attached to."""
        return self._attached.get(name)

    def __getitem__(self, name: str) -> SharedRing:
        return self._attached[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._attached))

    def __len__(self) -> int:
        return len(self._attached)

    def close(self) -> None:
        with self._guard:
            for ring in self._attached.values():
                ring.close()
            self._attached.clear()

    def after_fork(self) -> None:
        """In the child: the memory is the same, but a lock may have been somebody's."""
        self._guard = threading.Lock()

    def _attach(self, name: str) -> bool:
        with self._guard:
            if name in self._attached:
                return True
            try:
                ring = SharedRing.attach(name)
            except RingError as error:
                _log.debug("%s is read over the network: %s", name, error)
                self._elsewhere[name] = None
                if len(self._elsewhere) > MOST_ELSEWHERE:
                    self._elsewhere.popitem(last=False)
                return False
            self._let_go()
            self._attached[name] = ring
            return True

    def _let_go(self) -> None:
        gone = [name for name in self._attached if is_gone(name)]
        crowd = len(self._attached) - len(gone) - MOST_RINGS + 1
        gone += [name for name in list(self._attached)[: max(crowd, 0)] if name not in gone]
        for name in gone:
            self._attached.pop(name).close()  # whoever reads from it at this moment gets RingError
