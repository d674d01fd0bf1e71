"""The simulated network: links between hosts, and what faults do to them. `sockets.py` is what processes use of it.

Latency is drawn for each packet, most of it short and some of it long, so packets overtake each other. What TCP
carries is never lost: on a lossy link it is late, on a cut one it waits for the healing, even if its sender has died
or given up by then. So a request can still arrive long after its sender has repeated it. Datagrams are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from random import Random
from typing import Any

import msgspec

from nvrx_slurm.lab.simulation.loop import VirtualLoop

LATENCY_S = 0.0001
LONGEST_S = 0.05
# Linux's shortest retransmission timeout; it doubles (TCP_RTO_MIN, net/tcp.h).
RESEND_S = 0.2

MOST_RESENDS = 6

# Whether a fault is on the link from one host to another.
Concerns = Callable[[str, str], bool]


def apart(hosts: Collection[str]) -> Concerns:
    """Both ways between these hosts and all others."""
    return lambda source, target: (source in hosts) != (target in hosts)


def one_way(sources: Collection[str], targets: Collection[str]) -> Concerns:
    """From the first to the second; the other way stays open."""
    return lambda source, target: source in sources and target in targets


class NetworkFault(msgspec.Struct, frozen=True, eq=False):
    """What is wrong on some links. `slow_s` is added to each packet; `loss` is the share of packets that is lost;
    `breaks` the share of calls whose connection is reset, before they are carried out or before they are answered."""

    concerns: Concerns
    cut: bool = False
    slow_s: float = 0.0
    loss: float = 0.0
    breaks: float = 0.0


class Link(msgspec.Struct, eq=False):
    """One direction between two hosts. `parked`: what waits for the healing; each gets its delay then."""

    source: str
    target: str
    cut_at: float | None = None
    slow_s: float = 0.0
    loss: float = 0.0
    breaks: float = 0.0
    parked: list[Callable[[float], object]] = []


class SimulatedNetwork:
    """All links between hosts, which are known by name. A host reaches itself as fast as others, and always."""

    def __init__(self, loop: VirtualLoop, chance: Random) -> None:
        self.loop, self.chance, self._draw = loop, chance, chance.random
        self._links: dict[tuple[str, str], Link] = {}
        self._faults: list[NetworkFault] = []
        self.when_cut: Callable[[], object] = lambda: None
        """Called whenever a link is newly cut."""
        self._last_port = 40_000

    # ---- faults

    def begin(self, fault: NetworkFault) -> Callable[[], None]:
        """Have something go wrong; the result heals it."""
        self._faults.append(fault)
        self._apply()

        def heal() -> None:
            if fault in self._faults:
                self._faults.remove(fault)
                self._apply()

        return heal

    def cut(self, concerns: Concerns) -> Callable[[], None]:
        """Nothing comes through on these ways until the result is called."""
        return self.begin(NetworkFault(concerns, cut=True))

    def power_off(self, host: str) -> Callable[[], None]:
        """Its kernel is gone, with all that it had still to send; no peer is notified. The result puts it back.

        Its processes are the caller's to kill, afterwards.
        """

        def forget_unsent() -> None:
            for (source, _), link in self._links.items():
                if source == host:
                    link.parked.clear()

        def power_on() -> None:
            forget_unsent()
            heal()

        forget_unsent()
        heal = self.cut(apart([host]))
        return power_on

    def _apply(self) -> None:
        newly_cut = [link for link in self._links.values() if self._set(link)]
        if newly_cut:  # only now: it asks for the silence of links that are all set
            self.when_cut()

    def _set(self, link: Link) -> bool:
        """What all faults together make of a link; whether it is newly cut."""
        faults = [fault for fault in self._faults if fault.concerns(link.source, link.target)]
        link.slow_s = sum(fault.slow_s for fault in faults)
        link.loss = max((fault.loss for fault in faults), default=0.0)
        link.breaks = max((fault.breaks for fault in faults), default=0.0)
        was_cut, is_cut = link.cut_at is not None, any(fault.cut for fault in faults)
        if is_cut and not was_cut:
            link.cut_at = self.loop.now_s
        elif was_cut and not is_cut:
            link.cut_at = None
            parked, link.parked = link.parked, []
            for go in parked:
                go(self.delay_s(link))  # each its own: what was sent first need not arrive first
        return is_cut and not was_cut

    # ---- ways

    def link(self, source: str, target: str) -> Link:
        try:
            return self._links[source, target]
        except KeyError:
            link = self._links[source, target] = Link(source, target)
            self._set(link)
            return link

    def send(self, link: Link, callback: Callable[..., object], *args: Any) -> None:
        """Have a packet of TCP's on its link: its arrival is a step of the world."""
        self.carry(link, lambda delay_s: self.loop.call_outside(delay_s, callback, *args))

    def carry(self, link: Link, go: Callable[[float], object]) -> None:
        """The same, where `go` is called with the delay, now, or when the link is healed."""
        if link.cut_at is None:
            go(self.delay_s(link))
        else:
            link.parked.append(go)

    def delay_s(self, link: Link) -> float:
        """How long one packet takes: half of them about the latency, one in a hundred a hundred times as long."""
        delay_s = LATENCY_S / (1.0 - self._draw())
        delay_s = link.slow_s + (delay_s if delay_s < LONGEST_S else LONGEST_S)  # four times as cheap as min()
        if link.loss:
            for again in range(MOST_RESENDS):
                if self._draw() >= link.loss:
                    break
                delay_s += RESEND_S * 2**again
        return delay_s

    def is_lost(self, link: Link) -> bool:
        """Whether a datagram that is sent now does not arrive."""
        return link.cut_at is not None or (link.loss > 0.0 and self._draw() < link.loss)

    def silence_s(self, source: str, target: str) -> float:
        """Seconds since the kernels of two hosts last reached each other, both ways."""
        cuts = [
            link.cut_at for link in (self.link(source, target), self.link(target, source)) if link.cut_at is not None
        ]
        return self.loop.now_s - min(cuts) if cuts else 0.0

    def new_port(self) -> int:
        self._last_port += 1
        return self._last_port
