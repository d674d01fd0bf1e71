"""The links of nodes that have networks of their own: cut, slow, and well again."""

from __future__ import annotations

from nvrx_slurm.errors import FaultFailed
from nvrx_slurm.lab.faults.network import BATCH, Network
from nvrx_slurm.lab.flow.stages.base import Hit, Scene
from nvrx_slurm.lab.flow.stages.strikes import Strike
from nvrx_slurm.lab.flow.stages.targets import Arguments, node_of
from nvrx_slurm.util.clock import Clock

CUT, SLOW, HEALED = "cuts off", "slows", "carries all of"


class Links:
    """What is done to each node's link by now; several faults add up. `batch_host` means the host that is no node."""

    def __init__(self, network: Network, clock: Clock) -> None:
        self._network, self._clock = network, clock
        self._cut: set[str] = set()
        self._slow: dict[str, tuple[float, float]] = {}

    def table(self) -> dict[str, Strike]:
        return {"cut_link": self.cut, "slow_link": self.slow, "heal_link": self.heal}

    def cut(self, arguments: Arguments, scene: Scene) -> Hit:
        host, at = _host(arguments, scene), self._clock.wall()
        self._cut.add(host)
        return self._hit(host, at, CUT)

    def slow(self, arguments: Arguments, scene: Scene) -> Hit:
        host, at = _host(arguments, scene), self._clock.wall()
        self._slow[host] = (float(arguments.get("delay", 0.0)), float(arguments.get("loss", 0.0)))
        return self._hit(host, at, SLOW)

    def heal(self, arguments: Arguments, scene: Scene) -> Hit:
        host, at = _host(arguments, scene), self._clock.wall()
        if host not in self._cut | self._slow.keys():
            raise FaultFailed(f"the link of {host} is well: there is nothing to heal")
        self._cut.discard(host)
        self._slow.pop(host, None)
        return self._hit(host, at, HEALED)

    def _hit(self, host: str, at: float, what: str) -> Hit:
        """Tell the switch, and compare what it holds by its own word."""
        cut, slow = set(self._network.cut(self._cut)), self._network.slow(self._slow)
        holds = CUT if host in cut and what == CUT else SLOW if host in slow and what == SLOW else HEALED
        if holds != what:
            raise FaultFailed(f"the switch {holds} {host}, and was told otherwise")
        how = f": {slow[host][0]:g} s late, {slow[host][1]:.0%} lost" if what == SLOW else ""
        return Hit(at=at, proof=f"the switch says that it {what} {host}{how}", bound=host)


def _host(arguments: Arguments, scene: Scene) -> str:
    return BATCH if arguments.get("batch_host") else node_of(arguments, scene.world)
