"""The adversary: what goes wrong in a history, when, and for how long, all drawn from the seed beforehand.

An act knows nothing of the others, so a history can be told again without some of them, until the fewest are left
that still break a promise.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from nvrx_slurm.simulation.network import Fault, apart
from nvrx_slurm.simulation.shapes import Shape

if TYPE_CHECKING:
    from nvrx_slurm.simulation.history import History

QUIET, STORMY = 0.2, 0.15
FEW, MANY = (1, 4), (6, 16)
SHARES = (0.1, 0.3, 1.0)
"""Of all kinds of acts, so many does one adversary know."""

FALL_TOGETHER = 0.4
"""How often an act falls close to the one before: while that one is still being dealt with."""


@dataclass(frozen=True, slots=True)
class Act:
    """One thing that goes wrong, `at_s` into the history. `number` chooses among what there is (a rank, a commit)."""

    at_s: float
    kind: str
    node: str = ""
    lasts_s: float = 0.0
    number: int = 0

    def __str__(self) -> str:
        where = f" {self.node}" if self.node else ""
        lasts = f" for {self.lasts_s:.3f} s" if KINDS[self.kind].lasts else ""
        which = f" ({self.number})" if KINDS[self.kind].chooses else ""
        return f"{self.at_s:8.3f} s  {KINDS[self.kind].words}{where}{which}{lasts}"


@dataclass(frozen=True, slots=True)
class Kind:
    """What an act of this kind does. `node`: to a node, which may be lost by it; `on_slurm`: only with a network in
    between; `network`: to the ways between hosts; `fatal`: the job need not finish after it; `outage`: nobody may be
    able to decide while it lasts."""

    words: str
    do: Callable[[History, Act], None]
    weight: float
    node: bool = False
    lasts: bool = False
    chooses: bool = False
    on_slurm: bool = False
    network: bool = False
    fatal: bool = False
    outage: bool = False


def draw_acts(chance: Random, shape: Shape) -> tuple[Act, ...]:
    """The acts of a history, in the order of their times."""
    least, most = _how_many(chance)
    names = _repertoire(chance, shape)
    weights = [KINDS[name].weight for name in names]
    acts: list[Act] = []
    at_s = 0.0
    for _ in range(chance.randint(least, most)):
        close = acts and chance.random() < FALL_TOGETHER
        at_s = at_s + chance.expovariate(2.0) if close else chance.uniform(0.0, 1.2 * shape.work_s + 3.0)
        acts.append(_draw_act(chance, shape, at_s, chance.choices(names, weights)[0]))
    return tuple(sorted(acts, key=lambda act: act.at_s))


def _repertoire(chance: Random, shape: Shape) -> list[str]:
    """What this adversary knows: the fewer kinds, the more often each strikes, and meets itself."""
    possible = [name for name, kind in KINDS.items() if shape.cluster == "slurm" or not kind.on_slurm]
    share = chance.choice(SHARES)
    return [name for name in possible if chance.random() < share] or [chance.choice(possible)]


def perform(history: History, act: Act) -> None:
    """Do it, and remember for how long nobody may rely on what it was done to."""
    kind = KINDS[act.kind]
    until_s = history.loop.now_s + act.lasts_s
    for name in (act.node,) if kind.node else history.nodes if kind.lasts else ():
        history.nodes[name].weak_until_s = max(history.nodes[name].weak_until_s, until_s)
    kind.do(history, act)


def _how_many(chance: Random) -> tuple[int, int]:
    kind = chance.random()
    if kind < QUIET:
        return 0, 0
    return MANY if kind < QUIET + STORMY else FEW


def _draw_act(chance: Random, shape: Shape, at_s: float, name: str) -> Act:
    kind, bounds = KINDS[name], shape.plan.fault_tolerance
    lengths_s = (0.3, bounds.heartbeat_interval_s, bounds.heartbeat_timeout_s, bounds.gives_away_after_s)
    return Act(
        at_s=0.0 if kind.fatal is False and name in AT_START else round(at_s, 3),
        kind=name,
        node=chance.choice(shape.nodes) if kind.node else "",
        lasts_s=round(chance.choice(lengths_s) * chance.uniform(0.3, 1.6), 3) if kind.lasts else 0.0,
        number=chance.randrange(1000) if kind.chooses else 0,
    )


# ---- nodes


def _kill_agent(history: History, act: Act) -> None:
    history.nodes[act.node].kill_agent()


def _start_agent(history: History, act: Act) -> None:
    history.loop.call_outside(act.lasts_s, history.nodes[act.node].start_agent)


def _freeze_agent(history: History, act: Act) -> None:
    node = history.nodes[act.node]
    if (agent := node.agent) is not None:
        agent.freeze()
        history.loop.call_outside(act.lasts_s, agent.thaw)


def _kill_supervisor(history: History, act: Act) -> None:
    if (supervisor := history.nodes[act.node].supervisor) is not None:
        supervisor.process.kill()


def _freeze_supervisor(history: History, act: Act) -> None:
    if (supervisor := history.nodes[act.node].supervisor) is not None:
        supervisor.process.freeze()
        history.loop.call_outside(act.lasts_s, supervisor.process.thaw)


def _kill_worker(history: History, act: Act) -> None:
    if (worker := history.nodes[act.node].worker(act.number)) is not None:
        worker.kill()


def _fail_worker(history: History, act: Act) -> None:
    if (worker := history.nodes[act.node].worker(act.number)) is not None:
        worker.exit(1)


def _freeze_worker(history: History, act: Act) -> None:
    if (worker := history.nodes[act.node].worker(act.number)) is not None:
        worker.freeze()
        history.loop.call_outside(act.lasts_s, worker.thaw)


def _hang_worker(history: History, act: Act) -> None:
    """Only where somebody watches for it: without any bound for hangs the job would hang, rightly."""
    worker = history.nodes[act.node].worker(act.number)
    if worker is not None and history.plan.fault_tolerance.hang.step_s is not None:
        worker.hang()


def _freeze_node(history: History, act: Act) -> None:
    node = history.nodes[act.node]
    node.freeze()
    history.loop.call_outside(act.lasts_s, node.thaw)


def _kill_everything(history: History, act: Act) -> None:
    history.nodes[act.node].kill_everything()


def _power_off(history: History, act: Act) -> None:
    history.nodes[act.node].power_off()


def _reboot(history: History, act: Act) -> None:
    node = history.nodes[act.node]
    node.power_off()
    history.loop.call_outside(act.lasts_s, node.power_on)


def _start_late(history: History, act: Act) -> None:
    history.nodes[act.node].starts_after_s = act.lasts_s


def _never_start(history: History, act: Act) -> None:
    history.nodes[act.node].starts_after_s = None


# ---- the network


def _cut(history: History, act: Act) -> None:
    history.cut([act.node], act.lasts_s)


def _partition(history: History, act: Act) -> None:
    chance = Random(act.number)
    history.cut([name for name in history.nodes if chance.random() < 0.4], act.lasts_s)


def _cut_frozen(history: History, act: Act) -> None:
    _cut(history, act)
    _freeze_node(history, act)


def _slow_link(history: History, act: Act) -> None:
    history.strike([act.node], Fault(apart([act.node]), slow_s=act.number / 1000), act.lasts_s)


def _lossy_link(history: History, act: Act) -> None:
    share = act.number / 2000
    history.strike([act.node], Fault(apart([act.node]), loss=share, breaks=share), act.lasts_s)


def _break_tether(history: History, act: Act) -> None:
    history.nodes[act.node].break_tether()


# ---- the control plane


def _kill_controller(history: History, act: Act) -> None:
    if history.controller is not None:
        history.controller.kill()


def _kill_controller_at_commit(history: History, act: Act) -> None:
    history.store.kill_at_commit(after=act.number // 3 % 5, moment=act.number % 3)


def _freeze_controller(history: History, act: Act) -> None:
    if (controller := history.controller) is not None:
        controller.freeze()
        history.loop.call_outside(act.lasts_s, controller.thaw)


def _restart_store(history: History, act: Act) -> None:
    history.store.restart(down_s=act.lasts_s)


def _freeze_store(history: History, act: Act) -> None:
    history.store.freeze(for_s=act.lasts_s)


def _set_clock(history: History, act: Act) -> None:
    history.store_clock.set_by(act.number - 500.0)


# ---- the job


def _scancel(history: History, act: Act) -> None:
    history.scancel(signal.SIGTERM)


def _interrupt(history: History, act: Act) -> None:
    history.scancel(signal.SIGINT)


def _time_limit(history: History, act: Act) -> None:
    history.batch.tell(signal.SIGUSR1)


KINDS: dict[str, Kind] = {
    "kill_agent": Kind("kill the agent of", _kill_agent, 3, node=True),
    "start_agent": Kind("start a new agent, if there is none, on", _start_agent, 2, node=True, lasts=True),
    "freeze_agent": Kind("freeze the agent of", _freeze_agent, 3, node=True, lasts=True),
    "kill_supervisor": Kind("kill the supervisor of", _kill_supervisor, 3, node=True),
    "freeze_supervisor": Kind("freeze the supervisor of", _freeze_supervisor, 2, node=True, lasts=True),
    "kill_worker": Kind("kill a worker of", _kill_worker, 4, node=True, chooses=True),
    "fail_worker": Kind("a worker fails on", _fail_worker, 4, node=True, chooses=True),
    "freeze_worker": Kind("freeze a worker of", _freeze_worker, 2, node=True, lasts=True, chooses=True),
    "hang_worker": Kind("a worker hangs on", _hang_worker, 2, node=True, chooses=True),
    "freeze_node": Kind("freeze", _freeze_node, 4, node=True, lasts=True),
    "kill_everything": Kind("kill everything on", _kill_everything, 4, node=True),
    "power_off": Kind("power off", _power_off, 4, node=True, on_slurm=True),
    "reboot": Kind("power off and on again", _reboot, 3, node=True, lasts=True, on_slurm=True),
    "start_late": Kind("late to start:", _start_late, 2, node=True, lasts=True),
    "never_start": Kind("never starts:", _never_start, 1, node=True),
    "cut": Kind("cut off", _cut, 5, node=True, lasts=True, on_slurm=True, network=True),
    "partition": Kind(
        "cut off two of five nodes", _partition, 2, lasts=True, chooses=True, on_slurm=True, network=True, fatal=True
    ),
    "cut_frozen": Kind("freeze, and cut off,", _cut_frozen, 3, node=True, lasts=True, on_slurm=True, network=True),
    "slow_link": Kind(
        "slow (ms) link of", _slow_link, 2, node=True, lasts=True, chooses=True, on_slurm=True, network=True
    ),
    "lossy_link": Kind(
        "lossy (1/2000) link of", _lossy_link, 2, node=True, lasts=True, chooses=True, on_slurm=True, network=True
    ),
    "break_tether": Kind("break the tether of", _break_tether, 2, node=True, on_slurm=True),
    "kill_controller": Kind("kill the controller", _kill_controller, 4),
    "kill_at_commit": Kind(
        "kill the controller at a commit", _kill_controller_at_commit, 5, chooses=True, lasts=False
    ),
    "freeze_controller": Kind("freeze the controller", _freeze_controller, 3, lasts=True, outage=True),
    "restart_store": Kind("kill the store; it is back", _restart_store, 4, lasts=True, outage=True),
    "freeze_store": Kind("freeze the store", _freeze_store, 3, lasts=True, outage=True),
    "set_clock": Kind("set the store's clock by (less 500 s)", _set_clock, 2, chooses=True),
    "scancel": Kind("scancel", _scancel, 1, fatal=True),
    "interrupt": Kind("Ctrl-C", _interrupt, 0.5, fatal=True),
    "time_limit": Kind("the time limit is near", _time_limit, 0.7, fatal=True),
}
AT_START = ("start_late", "never_start")
