"""The adversary: what goes wrong in a run, when, and for how long, all drawn from the seed before the run begins.

`KINDS` has every kind of fault with what it does, `draw_acts` draws those of one run, and `perform` carries one out.
An act has its time, or an aim: an event of the journal. A run can be repeated with fewer acts, until only those are
left that a broken promise needs.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Flag, auto
from random import Random
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from nvrx_slurm.journal.records import (
    DrainAsked,
    FromAgent,
    NodeFenced,
    NodeJoined,
    Progress,
    RestartAsked,
    Signalled,
    UndrainAsked,
    WorkerFailed,
    WorkersStarted,
)
from nvrx_slurm.journal.restarts import InProcessRestart
from nvrx_slurm.lab.simulation.aims import BEFORE, UNANSWERED, Aim, draw_aim
from nvrx_slurm.lab.simulation.intruder import copy_order, forge_connection, forge_record, post_outside
from nvrx_slurm.lab.simulation.network import NetworkFault, apart
from nvrx_slurm.lab.simulation.shapes import Shape
from nvrx_slurm.lab.simulation.store import CommitFault

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.node import SimulatedNode
    from nvrx_slurm.lab.simulation.run import SimulationRun

# Shares of the runs without an act, and with many.
QUIET, STORMY = 0.2, 0.15

# The share of the runs in which users ask for something.
ASKING = 0.3

# The share of the runs on Slurm in which it requeues the job.
REQUEUED = 0.2

FEW, MANY = (1, 4), (6, 16)
# One adversary knows this share of all kinds of acts.
SHARES = (0.1, 0.3, 1.0)

# One adversary aims this share of its acts; the others happen at a time.
AIMED = (0.0, 0.3, 0.7)

# How far apart the nodes of a job are suspended, and resumed.
MOST_SKEW_S = 1.5

# No agent of a run sends so many facts.
FRESH_NUMBER = 1000

# No run has so many generations. A record of the next one might arrive when that has begun, and would be true then.
OTHER_GENERATION = 100

# A take-over has about as many.
AWAITS = 48

# How often an act follows closely on the one before, while the product still deals with that one.
FALL_TOGETHER = 0.4

# How many acts a second do.
CLOSE = (2.0, 2.0, 0.5)


class Trait(Flag):
    """What an act does and needs, as far as its drawing and the promises depend on it."""

    NODE = auto()  # it is done to one node, which may be lost by it
    LASTS = auto()  # it ends after `lasts_s`
    CHOOSES = auto()  # it has a `number`
    AT_START = auto()  # it is done before the run begins
    ON_SLURM = auto()  # it needs a network between hosts, which a local job has not
    NETWORK = auto()  # it disturbs links between hosts
    FATAL = auto()  # the job need not finish after it
    SUSPENDS = auto()  # every process of the job stands still
    ASKED = auto()  # a user asks the job for something: of these there are few, and beside all others
    REQUEUES = auto()  # Slurm requeues the job; drawn apart, too
    OUTAGE = auto()  # the controller may be unable to decide while it lasts
    STAGED = auto()  # it makes sense in a situation that is made for it (`situations`): no swarm knows it


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of act: what it is called, how often it is drawn, and what it does."""

    words: str
    weight: float
    traits: Trait
    do: Callable[[SimulationRun, Act], object]


@dataclass(frozen=True, slots=True)
class Act:
    """One thing that goes wrong, `at_s` into the run; with an `aim`, at such an event from then on. `number` chooses
    among what there is (a rank, a commit). An aimed act without a `node` is done to that of the event."""

    at_s: float
    kind: str
    node: str = ""
    lasts_s: float = 0.0
    number: int = 0
    aim: Aim | None = None

    @property
    def traits(self) -> Trait:
        return KINDS[self.kind].traits

    @property
    def is_on_node(self) -> bool:
        return bool(self.traits & Trait.NODE)

    def __str__(self) -> str:
        where = f" {self.node}" if self.node else ""
        which = f" ({self.number})" if self.traits & Trait.CHOOSES else ""
        lasts = f" for {self.lasts_s:.3f} s" if self.traits & Trait.LASTS else ""
        when = f", {self.aim}" if self.aim else ""
        return f"{self.at_s:8.3f} s  {KINDS[self.kind].words}{where}{which}{lasts}{when}"


class Swarm:
    """One adversary: it knows some kinds of acts, and prefers some of those. The fewer it knows, the more often each
    happens, and overlaps with itself; what it does not know cannot end a run before its other acts matter."""

    def __init__(self, chance: Random, shape: Shape) -> None:
        possible = [
            name
            for name, kind in KINDS.items()
            if (shape.cluster == "slurm" or not kind.traits & Trait.ON_SLURM)
            and not kind.traits & (Trait.ASKED | Trait.REQUEUES | Trait.STAGED)
        ]
        share = chance.choice(SHARES)
        self._names = [name for name in possible if chance.random() < share] or [chance.choice(possible)]
        self._weights = [KINDS[name].weight * chance.expovariate(1.0) for name in self._names]
        self._aimed = chance.choice(AIMED)
        self._shape = shape

    def draw(self, chance: Random, at_s: float, *, may_follow: bool) -> Act:
        name = chance.choices(self._names, self._weights)[0]
        traits, bounds = KINDS[name].traits, self._shape.plan.fault_tolerance
        lengths_s = (0.3, bounds.heartbeat.interval, bounds.heartbeat.timeout, bounds.gives_away_after_s)
        aim = draw_aim(chance, may_follow=may_follow) if chance.random() < self._aimed else None
        if traits & Trait.AT_START:
            at_s, aim = 0.0, None
        elif aim is not None:  # most events of a run are in its first half: later the aim would wait in vain
            at_s = at_s if aim.follows else chance.choice((0.0, 0.5 * at_s))
        node = chance.choice(self._shape.nodes) if traits & Trait.NODE else ""
        if aim is not None and chance.random() < 0.7:
            node = ""
        return Act(
            at_s=round(at_s, 3),
            kind=name,
            node=node,
            lasts_s=round(chance.choice(lengths_s) * chance.uniform(0.3, 1.6), 3) if traits & Trait.LASTS else 0.0,
            # An aimed act has a number as well: by it `AimedActs` chooses a node, and how long to wait for the event.
            number=chance.randrange(1000) if traits & Trait.CHOOSES or aim else 0,
            aim=aim,
        )


def draw_acts(chance: Random, shape: Shape) -> tuple[Act, ...]:
    """The acts of a run, in the order of their times; one that follows another stands behind it."""
    storm = chance.random()
    least, most = (0, 0) if storm < QUIET else MANY if storm < QUIET + STORMY else FEW
    swarm = Swarm(chance, shape)
    drawn: list[Act] = []
    at_s = 0.0
    for _ in range(chance.randint(least, most)):
        close = bool(drawn) and chance.random() < FALL_TOGETHER
        # Within the time that the job takes without a fault. What comes close behind another one may find it in its
        # recovery, or in the silence before that.
        at_s = at_s + chance.expovariate(chance.choice(CLOSE)) if close else chance.uniform(0.0, shape.work_s)
        act = swarm.draw(chance, at_s, may_follow=bool(drawn))
        drawn.append(act)
    return in_order(drawn)


def draw_requests(chance: Random, shape: Shape) -> tuple[Act, ...]:
    """What users ask for in a run: mostly nothing."""
    return _draw_apart(chance, shape, Trait.ASKED, chance.randint(*FEW)) if chance.random() < ASKING else ()


def draw_requeues(chance: Random, shape: Shape) -> tuple[Act, ...]:
    """How often Slurm requeues the job, and when: mostly never."""
    if shape.cluster != "slurm" or chance.random() >= REQUEUED:
        return ()
    return _draw_apart(chance, shape, Trait.REQUEUES, chance.choice((1, 1, 2)))


def _draw_apart(chance: Random, shape: Shape, trait: Trait, many: int) -> tuple[Act, ...]:
    """So many acts of kinds with this trait, by a `chance` of their own: a seed's other acts stay what they were."""
    kinds = [name for name, kind in KINDS.items() if kind.traits & trait]
    drawn: list[Act] = []
    for _ in range(many):
        kind = chance.choice(kinds)
        aim = draw_aim(chance, may_follow=False) if chance.random() < 0.5 else None
        at_s = chance.uniform(0.0, shape.work_s) * (0.5 if aim else 1.0)
        node = chance.choice(shape.nodes) if KINDS[kind].traits & Trait.NODE else ""
        drawn.append(Act(at_s=round(at_s, 3), kind=kind, node=node, number=chance.randrange(1000), aim=aim))
    return tuple(drawn)


def in_order(acts: Iterable[Act]) -> tuple[Act, ...]:
    """By their times; an act that follows another stays behind it."""
    groups: list[list[Act]] = []
    for act in acts:
        if act.aim is not None and act.aim.follows and groups:
            groups[-1].append(act)
        else:
            groups.append([act])
    return tuple(act for group in sorted(groups, key=lambda group: group[0].at_s) for act in group)


def perform(run: SimulationRun, act: Act) -> None:
    """Do it, and note it, and until when the nodes concerned are not expected to work."""
    run.performed.append(act)
    until_s = run.loop.now_s + act.lasts_s
    run.disturbed_until_s = max(run.disturbed_until_s, until_s)
    concerned = [act.node] if act.traits & Trait.NODE else run.nodes if act.traits & Trait.LASTS else ()
    for name in concerned:
        run.nodes[name].weak_until_s = max(run.nodes[name].weak_until_s, until_s)
    KINDS[act.kind].do(run, act)


# ---- what acts do


class Target(Protocol):
    """A process, a worker or a whole node."""

    def kill(self) -> None: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...


def _kill(target: Target | None) -> None:
    if target is not None:
        target.kill()


def _freeze(run: SimulationRun, act: Act, target: Target | None) -> None:
    if target is not None:
        target.freeze()
        run.loop.call_outside(act.lasts_s, _thaw, run, target)


def _thaw(run: SimulationRun, target: Target) -> None:
    """Not while Slurm has suspended the job: no process of it runs then."""
    if run.suspended:  # again: what was frozen after its own node's resume is not thawed by it
        run.loop.call_outside(MOST_SKEW_S, _thaw, run, target)
    else:
        target.thaw()


def _replace_frozen(run: SimulationRun, act: Act) -> None:
    """The batch host starts another controller once a frozen one has been killed: what arrived meanwhile waits."""
    if (frozen := run.controller) is not None:
        frozen.freeze()
        run.loop.call_outside(act.lasts_s, frozen.kill)


def _overtake(run: SimulationRun, act: Act) -> None:
    """The controller that leads freezes at one of its next awaits, and the batch host starts another one at once.

    One that does not lead yet is left alone: it would take the lease from its successor, whose end the batch host
    takes for the job's. No generation has two controllers but here, and one of an older generation gets no lease."""
    if run.contact.newest_leads:
        _freeze_controller(run, act)
        run.batch.start_another_controller()


def _freeze_controller(run: SimulationRun, act: Act) -> None:
    if run.controller is not None:
        run.controller.freeze_after(act.number % AWAITS)
        run.loop.call_outside(act.lasts_s, _thaw, run, run.controller)


def _fail_worker(run: SimulationRun, act: Act) -> None:
    if (worker := run.nodes[act.node].worker(act.number)) is not None:
        worker.exit(1)


def _hang_worker(run: SimulationRun, act: Act) -> None:
    worker, limits = run.nodes[act.node].worker(act.number), run.plan.fault_tolerance.hang
    if worker is None:
        return
    # Only where a bound detects it: without one the job would hang, as it should.
    if (limits.step_timeout if worker.world.steps()[0] else limits.startup_timeout) is not None:
        worker.hang()


def _fail_cycles(run: SimulationRun, act: Act) -> None:
    """In so many cycles to come a worker of the node fails, each time `lasts_s` after its start."""
    run.nodes[act.node].fails_cycles, run.nodes[act.node].fails_after_s = act.number, act.lasts_s


def _linger(run: SimulationRun, act: Act) -> None:
    """A worker ends so much later than the others of its world, with 0, as they do."""
    if (worker := run.nodes[act.node].worker(act.number)) is not None:
        worker.lingers_s = act.lasts_s


def _restart_in_process(run: SimulationRun, act: Act) -> None:
    """A group of ranks begins its function again, and says so; its agent learns of it, and nothing else follows."""
    node = run.nodes[act.node]
    worker, agent, board = node.worker(act.number), node.agent, node.board
    if worker is not None and agent is not None and board is not None:
        size = worker.world.size
        restart = InProcessRestart(
            cause="an exception", iteration=1 + act.number, world_size=size, active_world_size=size, total_s=0.1
        )
        agent.call_later(0.0, board.on_restart, restart)


def _repeat_record(run: SimulationRun, act: Act) -> None:
    """A record of an agent that the journal has long taken arrives once more: a request that was sent again. Or one
    of another generation does: the join of an agent that Slurm has requeued the job away from, or the signal that
    ended it."""
    facts = [entry.record for entry in run.promises.journal if isinstance(entry.record, FromAgent)]
    if not facts:
        return
    fact: FromAgent | Signalled = facts[act.number // 4 % len(facts)]
    joins = [each for each in facts if isinstance(each, NodeJoined)]
    if act.number % 4 == 0 and joins:
        join = joins[act.number // 4 % len(joins)]
        fact = replace(join, incarnation=f"{act.number:012x}", generation=OTHER_GENERATION)
    elif act.number % 4 == 1:
        fact = Signalled(reason="cancel", generation=OTHER_GENERATION)
    post_outside(run, fact)


def _repeat_join(run: SimulationRun, act: Act) -> None:
    """The join of an agent that another one has replaced since arrives once more: a request that was on its way."""
    history = run.promises.monitors.history
    joins = [each.record for each in run.promises.journal if isinstance(each.record, NodeJoined)]
    former = [
        each
        for each in joins
        if each.generation == history.generation and history.nodes[each.node].incarnation != each.incarnation
    ]
    if former:
        post_outside(run, former[act.number % len(former)])


def _former_proof(run: SimulationRun, act: Act) -> None:
    """The proof that a node's former agent is dead arrives while the death of its present one is not proven."""
    history = run.promises.monitors.history
    unproven = {name for replica in history.replicas.values() for name in replica.unproven}
    joins = (each.record for each in reversed(run.promises.journal) if isinstance(each.record, NodeJoined))
    for join in joins:
        if join.node in unproven and join.incarnation != history.nodes[join.node].incarnation:
            fact = NodeFenced(node=join.node, incarnation=join.incarnation, proof="its kernel says so")
            post_outside(run, fact)
            return


def _repeat_cycle(run: SimulationRun, act: Act) -> None:
    """An agent says again, under a fresh number, what it has said of an older cycle of the replica that it runs."""
    history = run.promises.monitors.history
    for entry in reversed(run.promises.journal):
        fact = entry.record
        if not isinstance(fact, WorkersStarted | WorkerFailed | Progress) or fact.generation != history.generation:
            continue
        node, replica = history.nodes[fact.node], history.replicas[fact.replica]
        runs = replica.state == "running" and node.place == "active" and node.replica == replica.id
        if runs and node.incarnation == fact.incarnation and fact.cycle < replica.cycle:
            # A record that is refused uses up no number: what the agent says itself, from here on, still counts.
            post_outside(run, replace(fact, seq=node.seq + FRESH_NUMBER))
            return


def _copy_order(run: SimulationRun, act: Act) -> None:
    """A process that can write into the store copies an order to the end of the stream, as it stands there."""
    if orders := run.store.data.xrange(run.keys.orders):
        run.loop.create_task(copy_order(run, *orders[act.number % len(orders)]))


def _ask_restart(run: SimulationRun, act: Act) -> None:
    """Of all replicas that run, or of one; now and then in a cycle that is over, or has not begun."""
    replicas = list(run.promises.monitors.history.replicas.values())
    chosen = replicas if act.number % 2 else [replicas[act.number % len(replicas)]]
    cycles = {
        each.id: max(0, each.cycle + (act.number // 7 % 5 == 0) - (act.number // 7 % 5 == 1)) for each in chosen
    }
    _ask(run, act, RestartAsked(request=f"{len(run.performed)}", by="a user", cycles=cycles))


def _ask_drain(run: SimulationRun, act: Act) -> None:
    force = act.number // 7 % 3 == 0
    _ask(run, act, DrainAsked(request=f"{len(run.performed)}", by="a user", node=act.node, force=force))


def _ask_undrain(run: SimulationRun, act: Act) -> None:
    """Of a node that is drained, if there is one."""
    node = ([*sorted(run.promises.monitors.history.drained), act.node])[0]
    _ask(run, act, UndrainAsked(request=f"{len(run.performed)}", by="a user", node=node))


def _ask(run: SimulationRun, act: Act, fact: RestartAsked | DrainAsked | UndrainAsked) -> None:
    """Post it; now and then twice, as another user of the store can copy it, or of another generation."""
    fact = replace(fact, generation=run.info.generation + (act.number % 11 == 0))
    for _ in range(1 + (act.number % 5 == 0)):
        post_outside(run, fact)


def _reboot(run: SimulationRun, act: Act) -> None:
    run.nodes[act.node].power_off()
    run.loop.call_outside(act.lasts_s, run.nodes[act.node].power_on)


def _start_late(run: SimulationRun, act: Act) -> None:
    run.nodes[act.node].starts_after_s = act.lasts_s


def _never_start(run: SimulationRun, act: Act) -> None:
    run.nodes[act.node].starts_after_s = None


def _partition(run: SimulationRun, act: Act) -> None:
    chance = Random(act.number)
    run.cut([name for name in run.nodes if chance.random() < 0.4], act.lasts_s)


def _cut_frozen(run: SimulationRun, act: Act) -> None:
    run.cut([act.node], act.lasts_s)
    _freeze(run, act, run.nodes[act.node])


def _cut_closed(run: SimulationRun, act: Act) -> None:
    """A device in between closes the connection and passes nothing any more: as where the host has died."""
    run.nodes[act.node].break_connection()
    run.cut([act.node], act.lasts_s)


def _slow_link(run: SimulationRun, act: Act) -> None:
    run.disturb([act.node], NetworkFault(apart([act.node]), slow_s=act.number / 1000), act.lasts_s)


def _lossy_link(run: SimulationRun, act: Act) -> None:
    share = act.number / 2000
    run.disturb([act.node], NetworkFault(apart([act.node]), loss=share, breaks=share), act.lasts_s)


def _set_clock(run: SimulationRun, act: Act) -> None:
    run.promises.knows_times = False
    run.store_clock.set_by(act.number - 500.0)


# From SIGTSTP to SIGSTOP.
SUSPEND_S = 2.0


def _suspend_all(run: SimulationRun, act: Act) -> None:
    """`scontrol suspend` and `resume`: the control plane and every node, each in a moment of its own."""
    if run.suspended or run.requeue.is_asked or run.requeue.waits:  # Slurm refuses a second one
        return
    run.suspended, run.promises.knows_times = True, False
    chance = Random(act.number)
    for host in (None, *run.nodes.values()):
        # Drawn for each host: slurmd signals its own processes, and no two do so at the same moment.
        notice_s, later_s = chance.uniform(0.0, MOST_SKEW_S), chance.uniform(0.0, MOST_SKEW_S)
        for at_s, number in (
            (notice_s, signal.SIGTSTP),
            (notice_s + SUSPEND_S, signal.SIGSTOP),
            (SUSPEND_S + MOST_SKEW_S + act.lasts_s + later_s, signal.SIGCONT),
        ):
            run.loop.call_outside(at_s, _signal_host, run, host, number)
    run.loop.call_outside(SUSPEND_S + 2 * MOST_SKEW_S + act.lasts_s, setattr, run, "suspended", False)


def _signal_host(run: SimulationRun, node: SimulatedNode | None, number: signal.Signals) -> None:
    """Every process of the job on one node; None: the control plane."""
    if node is not None:
        node.signal(number)
        return
    for process in (run.batch.process, run.store.process, run.controller):
        if process is not None:
            process.signal(number)


# Short names for the table.
NODE, LASTS, CHOOSES, ON_SLURM = Trait.NODE, Trait.LASTS, Trait.CHOOSES, Trait.ON_SLURM
STAGED = Trait.STAGED
LINK = Trait.ON_SLURM | Trait.NETWORK
REQUEUES = Trait.REQUEUES | LINK
OUTAGE, FATAL = Trait.LASTS | Trait.OUTAGE, Trait.FATAL

KINDS: dict[str, Kind] = {
    # ---- one node
    "kill_agent": Kind("kill the agent of", 3, NODE, lambda run, act: _kill(run.nodes[act.node].agent)),
    "start_agent": Kind(
        "start a new agent, if there is none, on",
        2,
        NODE | LASTS,
        lambda run, act: run.loop.call_outside(act.lasts_s, run.nodes[act.node].start_agent),
    ),
    "freeze_agent": Kind(
        "freeze the agent of", 3, NODE | LASTS, lambda run, act: _freeze(run, act, run.nodes[act.node].agent)
    ),
    "kill_supervisor": Kind(
        "kill the supervisor of", 3, NODE, lambda run, act: _kill(run.nodes[act.node].supervisor)
    ),
    "freeze_supervisor": Kind(
        "freeze the supervisor of",
        2,
        NODE | LASTS,
        lambda run, act: _freeze(run, act, run.nodes[act.node].supervisor),
    ),
    "kill_worker": Kind(
        "kill a worker of", 4, NODE | CHOOSES, lambda run, act: _kill(run.nodes[act.node].worker(act.number))
    ),
    "fail_worker": Kind("a worker fails on", 4, NODE | CHOOSES, _fail_worker),
    "freeze_worker": Kind(
        "freeze a worker of",
        2,
        NODE | LASTS | CHOOSES,
        lambda run, act: _freeze(run, act, run.nodes[act.node].worker(act.number)),
    ),
    "hang_worker": Kind("a worker hangs on", 2, NODE | CHOOSES, _hang_worker),
    "restart_in_process": Kind("ranks restart in process on", 1, NODE | CHOOSES, _restart_in_process),
    "freeze_node": Kind("freeze", 4, NODE | LASTS, lambda run, act: _freeze(run, act, run.nodes[act.node])),
    "kill_everything": Kind("kill everything on", 4, NODE, lambda run, act: _kill(run.nodes[act.node])),
    "power_off": Kind("power off", 4, NODE | ON_SLURM, lambda run, act: run.nodes[act.node].power_off()),
    "reboot": Kind("power off and on again", 3, NODE | LASTS | ON_SLURM, _reboot),
    "start_late": Kind("late to start:", 2, NODE | LASTS | Trait.AT_START, _start_late),
    "never_start": Kind("never starts:", 1, NODE | Trait.AT_START, _never_start),
    # ---- links between hosts
    "cut": Kind("cut off", 5, NODE | LASTS | LINK, lambda run, act: run.cut([act.node], act.lasts_s)),
    "partition": Kind("cut off two of five nodes", 2, LASTS | CHOOSES | LINK | FATAL, _partition),
    "cut_frozen": Kind("freeze, and cut off,", 3, NODE | LASTS | LINK, _cut_frozen),
    "cut_closed": Kind("close the connection of, and cut off,", 3, NODE | LASTS | LINK, _cut_closed),
    "slow_link": Kind("slow (ms) link of", 2, NODE | LASTS | CHOOSES | LINK, _slow_link),
    "lossy_link": Kind("lossy (1/2000) link of", 2, NODE | LASTS | CHOOSES | LINK, _lossy_link),
    "break_connection": Kind(
        "break the liveness connection of",
        2,
        NODE | ON_SLURM,
        lambda run, act: run.nodes[act.node].break_connection(),
    ),
    # ---- the control plane
    "kill_controller": Kind("kill the controller", 4, Trait(0), lambda run, act: _kill(run.controller)),
    "kill_at_commit": Kind(
        "kill the controller at a commit",
        5,
        CHOOSES,
        lambda run, act: run.store.at_commit(
            CommitFault(after=act.number // 3 % 5, moment=act.number % 3, do=lambda: _kill(run.controller))
        ),
    ),
    "freeze_controller": Kind(
        "at one of its next awaits freeze the controller", 3, OUTAGE | CHOOSES, _freeze_controller
    ),
    "overtake": Kind("start a second controller, and freeze the first", 4, LASTS | CHOOSES, _overtake),
    "overtake_at_commit": Kind(
        "at a commit start a second controller, and freeze the first",
        4,
        LASTS | CHOOSES,
        lambda run, act: run.store.at_commit(
            CommitFault(
                after=act.number // 4 % 5,
                moment=act.number % 4,
                do=lambda: _overtake(run, act),
                late_by=act.number // 20 % 3,
                can_happen=lambda: run.contact.newest_leads,
            )
        ),
    ),
    "break_commit": Kind(
        "a commit's connection breaks",
        2,
        CHOOSES,
        lambda run, act: run.store.at_commit(
            CommitFault(after=act.number // 2 % 5, moment=(BEFORE, UNANSWERED)[act.number % 2])
        ),
    ),
    "restart_store": Kind(
        "kill the store; it is back", 4, OUTAGE, lambda run, act: run.store.restart(down_s=act.lasts_s)
    ),
    "empty_store": Kind(
        "kill the store; it is back without its data",
        3,
        OUTAGE,
        lambda run, act: run.store.restart(down_s=act.lasts_s, keeps_data=False),
    ),
    "freeze_store": Kind("freeze the store", 3, OUTAGE, lambda run, act: _freeze(run, act, run.store.process)),
    "repeat_record": Kind("an old record, or one of another generation, arrives", 2, CHOOSES, _repeat_record),
    "forge_record": Kind(
        "a record without the job's key arrives", 2, CHOOSES, lambda run, act: forge_record(run, act.number)
    ),
    "forge_connection": Kind(
        "a process without the job's key connects as an agent",
        2,
        CHOOSES,
        lambda run, act: forge_connection(run, act.number),
    ),
    "set_clock": Kind(
        "set the store's clock by (less 500 s)",
        2,
        CHOOSES,
        _set_clock,
    ),
    # ---- its users
    "ask_restart": Kind("a user asks for a restart", 1, CHOOSES | Trait.ASKED, _ask_restart),
    "ask_drain": Kind("a user drains", 1, NODE | CHOOSES | Trait.ASKED, _ask_drain),
    "ask_undrain": Kind("a user undrains", 1, NODE | CHOOSES | Trait.ASKED, _ask_undrain),
    # ---- only in situations
    "fail_cycles": Kind(
        "in so many cycles a worker fails on", 1, NODE | LASTS | CHOOSES | Trait.AT_START | STAGED, _fail_cycles
    ),
    "replace_frozen": Kind("freeze the controller, and kill it then,", 1, OUTAGE | STAGED, _replace_frozen),
    "linger": Kind("a worker ends later than the others on", 1, NODE | LASTS | CHOOSES | STAGED, _linger),
    "repeat_join": Kind("the join of an agent that was replaced arrives", 1, CHOOSES | STAGED, _repeat_join),
    "former_proof": Kind("the proof of a former agent's death arrives", 1, CHOOSES | STAGED, _former_proof),
    "repeat_cycle": Kind("an agent speaks of an older cycle", 1, CHOOSES | STAGED, _repeat_cycle),
    "copy_order": Kind("an old order is copied to the end of the stream", 1, CHOOSES | STAGED, _copy_order),
    # ---- the job
    "requeue": Kind(
        "scontrol requeue", 1, CHOOSES | REQUEUES, lambda run, act: run.requeue.ask(act.number, loses_host=False)
    ),
    "requeue_lost": Kind(
        "the batch host's node is lost, and the job is requeued",
        1,
        CHOOSES | REQUEUES,
        lambda run, act: run.requeue.ask(act.number, loses_host=True),
    ),
    "suspend_all": Kind("suspend the job", 1, LASTS | CHOOSES | Trait.SUSPENDS, _suspend_all),
    "scancel": Kind("scancel", 1, FATAL, lambda run, act: run.scancel(signal.SIGTERM)),
    "interrupt": Kind("Ctrl-C", 0.5, FATAL, lambda run, act: run.scancel(signal.SIGINT)),
    "time_limit": Kind(
        "the time limit is near", 0.7, FATAL, lambda run, act: run.batch.process.signal(signal.SIGUSR1)
    ),
}
