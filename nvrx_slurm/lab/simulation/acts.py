"""What an adversary can do, one function a kind of act, to a history's nodes, network, control plane and job."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from nvrx_slurm.lab.simulation.network import Fault, apart

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.history import History


@dataclass(frozen=True, slots=True)
class Act:
    """One thing that goes wrong, `at_s` into the history. `number` chooses among what there is (a rank, a commit)."""

    at_s: float
    kind: str
    node: str = ""
    lasts_s: float = 0.0
    number: int = 0


# ---- nodes


def kill_agent(history: History, act: Act) -> None:
    history.nodes[act.node].kill_agent()


def start_agent(history: History, act: Act) -> None:
    history.loop.call_outside(act.lasts_s, history.nodes[act.node].start_agent)


def freeze_agent(history: History, act: Act) -> None:
    node = history.nodes[act.node]
    if (agent := node.agent) is not None:
        agent.freeze()
        history.loop.call_outside(act.lasts_s, agent.thaw)


def kill_supervisor(history: History, act: Act) -> None:
    if (supervisor := history.nodes[act.node].supervisor) is not None:
        supervisor.process.kill()


def freeze_supervisor(history: History, act: Act) -> None:
    if (supervisor := history.nodes[act.node].supervisor) is not None:
        supervisor.process.freeze()
        history.loop.call_outside(act.lasts_s, supervisor.process.thaw)


def kill_worker(history: History, act: Act) -> None:
    if (worker := history.nodes[act.node].worker(act.number)) is not None:
        worker.kill()


def fail_worker(history: History, act: Act) -> None:
    if (worker := history.nodes[act.node].worker(act.number)) is not None:
        worker.exit(1)


def freeze_worker(history: History, act: Act) -> None:
    if (worker := history.nodes[act.node].worker(act.number)) is not None:
        worker.freeze()
        history.loop.call_outside(act.lasts_s, worker.thaw)


def hang_worker(history: History, act: Act) -> None:
    """Only where somebody watches for it: without a bound for it the job would hang, rightly."""
    worker, limits = history.nodes[act.node].worker(act.number), history.plan.fault_tolerance.hang
    if (
        worker is not None
        and (limits.step_timeout if worker.world.steps()[0] else limits.startup_timeout) is not None
    ):
        worker.hang()


def freeze_node(history: History, act: Act) -> None:
    node = history.nodes[act.node]
    node.freeze()
    history.loop.call_outside(act.lasts_s, node.thaw)


def kill_everything(history: History, act: Act) -> None:
    history.nodes[act.node].kill_everything()


def power_off(history: History, act: Act) -> None:
    history.nodes[act.node].power_off()


def reboot(history: History, act: Act) -> None:
    node = history.nodes[act.node]
    node.power_off()
    history.loop.call_outside(act.lasts_s, node.power_on)


def start_late(history: History, act: Act) -> None:
    history.nodes[act.node].starts_after_s = act.lasts_s


def never_start(history: History, act: Act) -> None:
    history.nodes[act.node].starts_after_s = None


# ---- the network


def cut(history: History, act: Act) -> None:
    history.cut([act.node], act.lasts_s)


def partition(history: History, act: Act) -> None:
    chance = Random(act.number)
    history.cut([name for name in history.nodes if chance.random() < 0.4], act.lasts_s)


def cut_frozen(history: History, act: Act) -> None:
    cut(history, act)
    freeze_node(history, act)


def slow_link(history: History, act: Act) -> None:
    history.strike([act.node], Fault(apart([act.node]), slow_s=act.number / 1000), act.lasts_s)


def lossy_link(history: History, act: Act) -> None:
    share = act.number / 2000
    history.strike([act.node], Fault(apart([act.node]), loss=share, breaks=share), act.lasts_s)


def break_tether(history: History, act: Act) -> None:
    history.nodes[act.node].break_tether()


# ---- the control plane


def kill_controller(history: History, act: Act) -> None:
    if history.controller is not None:
        history.controller.kill()


def kill_controller_at_commit(history: History, act: Act) -> None:
    history.store.kill_at_commit(after=act.number // 3 % 5, moment=act.number % 3)


def freeze_controller(history: History, act: Act) -> None:
    if (controller := history.controller) is not None:
        controller.freeze()
        history.loop.call_outside(act.lasts_s, controller.thaw)


def restart_store(history: History, act: Act) -> None:
    history.store.restart(down_s=act.lasts_s)


def freeze_store(history: History, act: Act) -> None:
    history.store.freeze(for_s=act.lasts_s)


def set_clock(history: History, act: Act) -> None:
    history.store_clock.set_by(act.number - 500.0)


# ---- the job


def scancel(history: History, act: Act) -> None:
    history.scancel(signal.SIGTERM)


def interrupt(history: History, act: Act) -> None:
    history.scancel(signal.SIGINT)


def time_limit(history: History, act: Act) -> None:
    history.batch.tell(signal.SIGUSR1)
