"""The adversary: what goes wrong in a run, when, and for how long, all drawn from the seed beforehand.

The kinds of acts (`KINDS`), how a seed draws them (`draw_acts`) and how they are done (`perform`). No act depends on
another, so a run can be repeated with fewer acts, until only those are left that a broken promise needs.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from nvrx_slurm.lab.simulation.network import NetworkFault, apart
from nvrx_slurm.lab.simulation.shapes import Shape

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.run import SimulationRun


@dataclass(frozen=True, slots=True)
class Act:
    """One thing that goes wrong, `at_s` into the run. `number` chooses among what there is (a rank, a commit)."""

    at_s: float
    kind: str
    node: str = ""
    lasts_s: float = 0.0
    number: int = 0


# ---- nodes


def kill_agent(run: SimulationRun, act: Act) -> None:
    run.nodes[act.node].kill_agent()


def start_agent(run: SimulationRun, act: Act) -> None:
    run.loop.call_outside(act.lasts_s, run.nodes[act.node].start_agent)


def freeze_agent(run: SimulationRun, act: Act) -> None:
    node = run.nodes[act.node]
    if (agent := node.agent) is not None:
        agent.freeze()
        run.loop.call_outside(act.lasts_s, agent.thaw)


def kill_supervisor(run: SimulationRun, act: Act) -> None:
    if (supervisor := run.nodes[act.node].supervisor) is not None:
        supervisor.process.kill()


def freeze_supervisor(run: SimulationRun, act: Act) -> None:
    if (supervisor := run.nodes[act.node].supervisor) is not None:
        supervisor.process.freeze()
        run.loop.call_outside(act.lasts_s, supervisor.process.thaw)


def kill_worker(run: SimulationRun, act: Act) -> None:
    if (worker := run.nodes[act.node].worker(act.number)) is not None:
        worker.kill()


def fail_worker(run: SimulationRun, act: Act) -> None:
    if (worker := run.nodes[act.node].worker(act.number)) is not None:
        worker.exit(1)


def freeze_worker(run: SimulationRun, act: Act) -> None:
    if (worker := run.nodes[act.node].worker(act.number)) is not None:
        worker.freeze()
        run.loop.call_outside(act.lasts_s, worker.thaw)


def hang_worker(run: SimulationRun, act: Act) -> None:
    """Only where a bound detects it: without one the job would hang, as it should."""
    worker, limits = run.nodes[act.node].worker(act.number), run.plan.fault_tolerance.hang
    if (
        worker is not None
        and (limits.step_timeout if worker.world.steps()[0] else limits.startup_timeout) is not None
    ):
        worker.hang()


def freeze_node(run: SimulationRun, act: Act) -> None:
    node = run.nodes[act.node]
    node.freeze()
    run.loop.call_outside(act.lasts_s, node.thaw)


def kill_everything(run: SimulationRun, act: Act) -> None:
    run.nodes[act.node].kill_everything()


def power_off(run: SimulationRun, act: Act) -> None:
    run.nodes[act.node].power_off()


def reboot(run: SimulationRun, act: Act) -> None:
    node = run.nodes[act.node]
    node.power_off()
    run.loop.call_outside(act.lasts_s, node.power_on)


def start_late(run: SimulationRun, act: Act) -> None:
    run.nodes[act.node].starts_after_s = act.lasts_s


def never_start(run: SimulationRun, act: Act) -> None:
    run.nodes[act.node].starts_after_s = None


# ---- the network


def cut(run: SimulationRun, act: Act) -> None:
    run.cut([act.node], act.lasts_s)


def partition(run: SimulationRun, act: Act) -> None:
    chance = Random(act.number)
    run.cut([name for name in run.nodes if chance.random() < 0.4], act.lasts_s)


def cut_frozen(run: SimulationRun, act: Act) -> None:
    cut(run, act)
    freeze_node(run, act)


def slow_link(run: SimulationRun, act: Act) -> None:
    run.strike([act.node], NetworkFault(apart([act.node]), slow_s=act.number / 1000), act.lasts_s)


def lossy_link(run: SimulationRun, act: Act) -> None:
    share = act.number / 2000
    run.strike([act.node], NetworkFault(apart([act.node]), loss=share, breaks=share), act.lasts_s)


def break_connection(run: SimulationRun, act: Act) -> None:
    run.nodes[act.node].break_connection()


# ---- the control plane


def kill_controller(run: SimulationRun, act: Act) -> None:
    if run.controller is not None:
        run.controller.kill()


def kill_controller_at_commit(run: SimulationRun, act: Act) -> None:
    run.store.kill_at_commit(after=act.number // 3 % 5, moment=act.number % 3)


def freeze_controller(run: SimulationRun, act: Act) -> None:
    if (controller := run.controller) is not None:
        controller.freeze()
        run.loop.call_outside(act.lasts_s, controller.thaw)


def restart_store(run: SimulationRun, act: Act) -> None:
    run.store.restart(down_s=act.lasts_s)


def freeze_store(run: SimulationRun, act: Act) -> None:
    run.store.freeze(for_s=act.lasts_s)


def set_clock(run: SimulationRun, act: Act) -> None:
    run.store_clock.set_by(act.number - 500.0)


# ---- the job


def scancel(run: SimulationRun, act: Act) -> None:
    run.scancel(signal.SIGTERM)


def interrupt(run: SimulationRun, act: Act) -> None:
    run.scancel(signal.SIGINT)


def time_limit(run: SimulationRun, act: Act) -> None:
    run.batch.send_signal(signal.SIGUSR1)


QUIET, STORMY = 0.2, 0.15
FEW, MANY = (1, 4), (6, 16)
SHARES = (0.1, 0.3, 1.0)
"""Of all kinds of acts, so many does one adversary know."""

FALL_TOGETHER = 0.4
"""How often an act falls close to the one before: while that one is still being dealt with."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What an act of this kind does. `node`: to a node, which may be lost by it; `on_slurm`: only with a network in
    between; `network`: to the ways between hosts; `fatal`: the job need not finish after it; `outage`: the
    controller may be unable to decide while it lasts."""

    words: str
    do: Callable[[SimulationRun, Act], None]
    weight: float
    node: bool = False
    lasts: bool = False
    chooses: bool = False
    on_slurm: bool = False
    network: bool = False
    fatal: bool = False
    outage: bool = False


def in_words(act: Act) -> str:
    """An act in one line."""
    kind = KINDS[act.kind]
    where = f" {act.node}" if act.node else ""
    lasts = f" for {act.lasts_s:.3f} s" if kind.lasts else ""
    which = f" ({act.number})" if kind.chooses else ""
    return f"{act.at_s:8.3f} s  {kind.words}{where}{which}{lasts}"


def draw_acts(chance: Random, shape: Shape) -> tuple[Act, ...]:
    """The acts of a run, in the order of their times."""
    least, most = _how_many(chance)
    # Which kinds this run has: the fewer, the more often each happens, and overlaps itself.
    possible = [name for name, kind in KINDS.items() if shape.cluster == "slurm" or not kind.on_slurm]
    share = chance.choice(SHARES)
    names = [name for name in possible if chance.random() < share] or [chance.choice(possible)]
    weights = [KINDS[name].weight for name in names]
    drawn: list[Act] = []
    at_s = 0.0
    for _ in range(chance.randint(least, most)):
        close = drawn and chance.random() < FALL_TOGETHER
        at_s = at_s + chance.expovariate(2.0) if close else chance.uniform(0.0, 1.2 * shape.work_s + 3.0)
        drawn.append(_draw_act(chance, shape, at_s, chance.choices(names, weights)[0]))
    return tuple(sorted(drawn, key=lambda act: act.at_s))


def perform(run: SimulationRun, act: Act) -> None:
    """Do it, and note until when the nodes concerned are not expected to work."""
    kind = KINDS[act.kind]
    until_s = run.loop.now_s + act.lasts_s
    for name in (act.node,) if kind.node else run.nodes if kind.lasts else ():
        run.nodes[name].weak_until_s = max(run.nodes[name].weak_until_s, until_s)
    kind.do(run, act)


def _how_many(chance: Random) -> tuple[int, int]:
    kind = chance.random()
    if kind < QUIET:
        return 0, 0
    return MANY if kind < QUIET + STORMY else FEW


def _draw_act(chance: Random, shape: Shape, at_s: float, name: str) -> Act:
    kind, bounds = KINDS[name], shape.plan.fault_tolerance
    lengths_s = (0.3, bounds.heartbeat.interval, bounds.heartbeat.timeout, bounds.gives_away_after_s)
    return Act(
        at_s=0.0 if kind.fatal is False and name in AT_START else round(at_s, 3),
        kind=name,
        node=chance.choice(shape.nodes) if kind.node else "",
        lasts_s=round(chance.choice(lengths_s) * chance.uniform(0.3, 1.6), 3) if kind.lasts else 0.0,
        number=chance.randrange(1000) if kind.chooses else 0,
    )


KINDS: dict[str, Kind] = {
    "kill_agent": Kind("kill the agent of", kill_agent, 3, node=True),
    "start_agent": Kind("start a new agent, if there is none, on", start_agent, 2, node=True, lasts=True),
    "freeze_agent": Kind("freeze the agent of", freeze_agent, 3, node=True, lasts=True),
    "kill_supervisor": Kind("kill the supervisor of", kill_supervisor, 3, node=True),
    "freeze_supervisor": Kind("freeze the supervisor of", freeze_supervisor, 2, node=True, lasts=True),
    "kill_worker": Kind("kill a worker of", kill_worker, 4, node=True, chooses=True),
    "fail_worker": Kind("a worker fails on", fail_worker, 4, node=True, chooses=True),
    "freeze_worker": Kind("freeze a worker of", freeze_worker, 2, node=True, lasts=True, chooses=True),
    "hang_worker": Kind("a worker hangs on", hang_worker, 2, node=True, chooses=True),
    "freeze_node": Kind("freeze", freeze_node, 4, node=True, lasts=True),
    "kill_everything": Kind("kill everything on", kill_everything, 4, node=True),
    "power_off": Kind("power off", power_off, 4, node=True, on_slurm=True),
    "reboot": Kind("power off and on again", reboot, 3, node=True, lasts=True, on_slurm=True),
    "start_late": Kind("late to start:", start_late, 2, node=True, lasts=True),
    "never_start": Kind("never starts:", never_start, 1, node=True),
    "cut": Kind("cut off", cut, 5, node=True, lasts=True, on_slurm=True, network=True),
    "partition": Kind(
        "cut off two of five nodes",
        partition,
        2,
        lasts=True,
        chooses=True,
        on_slurm=True,
        network=True,
        fatal=True,
    ),
    "cut_frozen": Kind("freeze, and cut off,", cut_frozen, 3, node=True, lasts=True, on_slurm=True, network=True),
    "slow_link": Kind(
        "slow (ms) link of", slow_link, 2, node=True, lasts=True, chooses=True, on_slurm=True, network=True
    ),
    "lossy_link": Kind(
        "lossy (1/2000) link of", lossy_link, 2, node=True, lasts=True, chooses=True, on_slurm=True, network=True
    ),
    "break_connection": Kind("break the liveness connection of", break_connection, 2, node=True, on_slurm=True),
    "kill_controller": Kind("kill the controller", kill_controller, 4),
    "kill_at_commit": Kind(
        "kill the controller at a commit", kill_controller_at_commit, 5, chooses=True, lasts=False
    ),
    "freeze_controller": Kind("freeze the controller", freeze_controller, 3, lasts=True, outage=True),
    "restart_store": Kind("kill the store; it is back", restart_store, 4, lasts=True, outage=True),
    "freeze_store": Kind("freeze the store", freeze_store, 3, lasts=True, outage=True),
    "set_clock": Kind("set the store's clock by (less 500 s)", set_clock, 2, chooses=True),
    "scancel": Kind("scancel", scancel, 1, fatal=True),
    "interrupt": Kind("Ctrl-C", interrupt, 0.5, fatal=True),
    "time_limit": Kind("the time limit is near", time_limit, 0.7, fatal=True),
}
AT_START = ("start_late", "never_start")
