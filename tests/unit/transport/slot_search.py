"""A ring as a state that can be searched: actors that take one primitive step at a time, by the rules of `slots.py`.

A step is what one process does in one go: a transition under a slot's lock, or the copy of half a payload. Between
any two steps an actor may stop for as long as its lease, or die. The search looks at every state, so it also covers
an actor that stops for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from nvrx_slurm.transport import slots
from nvrx_slurm.transport.slots import Refusal, RingSlot, SlotOwner, State

LEASE_NS = 1  # a clock with two times: 0, at which leases begin, and 1, at which they have ended
Halves = tuple[int, int]


class Actor(NamedTuple):
    """A writer or a reader. `todo`: payloads left to write, or reads left; `step`: its position in the current one;
    `peeks`: a reader that copies first and takes then."""

    writes: bool
    todo: int
    peeks: bool = False
    step: int = 0
    slot: int = 0
    generation: int = 0
    attempt: int = 0
    seen: Halves = (0, 0)
    dead: bool = False
    lapsed: bool = False  # it stopped for longer than the lease of its slot


class World(NamedTuple):
    """The whole state. `memory`: for each slot, the generation of the bytes in each half; `refs`: payloads that were
    published."""

    slots: tuple[RingSlot, ...]
    memory: tuple[Halves, ...]
    actors: tuple[Actor, ...]
    overwrite: bool
    lapsed: Callable[..., bool] = slots.lapsed
    trusting: bool = False  # readers return what they have read, even if its end is refused
    refs: frozenset[tuple[int, int]] = frozenset()
    wrong: bool = False  # a reader has returned bytes of another payload


def successors(world: World, deaths: int) -> Iterator[World]:
    """Every world that one event makes of this one."""
    for number, actor in enumerate(world.actors):
        if actor.dead:
            continue
        if actor.step and not actor.lapsed:
            yield _with_actor(world, number, actor._replace(lapsed=True))
        if sum(other.dead for other in world.actors) < deaths:
            yield _with_actor(world, number, actor._replace(dead=True))
        if actor.todo:
            yield from _goes_on(world, number, actor)


def searched(start: World, deaths: int) -> Iterator[World]:
    """All reachable worlds, each once, breadth first."""
    seen, ahead = {start}, deque([start])
    while ahead:
        world = ahead.popleft()
        yield world
        for after in successors(world, deaths):
            if after not in seen:
                seen.add(after)
                ahead.append(after)


def current(world: World, index: int) -> RingSlot:
    """A slot as the next step finds it: without an owner that has lost it."""
    slot = world.slots[index]
    if slot.state not in (State.WRITING, State.READING):
        return slot
    actor = world.actors[slot.owner.pid]
    now_ns = LEASE_NS if actor.lapsed else 0
    return slots.reclaim(slot) if world.lapsed(slot, now_ns, owner_is_dead=actor.dead) else slot


def held(world: World) -> int:
    return sum(slot.state in (State.READY, State.READING) for slot in world.slots)


def _goes_on(world: World, number: int, actor: Actor) -> Iterator[World]:
    if actor.writes:
        yield from (_begin, _write_half, _write_half, _publish)[actor.step](world, number, actor)
    elif actor.peeks:
        yield from (_glance, _read_half, _read_half, _take)[actor.step](world, number, actor)
    else:
        yield from (_claim, _read_half, _read_half, _finish)[actor.step](world, number, actor)


def _begin(world: World, number: int, actor: Actor) -> Iterator[World]:
    """Begins in any slot that can be written: which one a real writer prefers is not what makes it safe."""
    generation = max(slot.generation for slot in world.slots) + 1
    for index in range(len(world.slots)):
        attempt = actor.attempt + 1
        owner = SlotOwner(number, 0, attempt)
        begun = slots.begin(current(world, index), generation, owner, overwrite=world.overwrite)
        if isinstance(begun, RingSlot):
            moved = actor._replace(step=1, slot=index, generation=generation, attempt=attempt, lapsed=False)
            yield _with_actor(_with_slot(world, index, begun), number, moved)


def _write_half(world: World, number: int, actor: Actor) -> Iterator[World]:
    memory = [list(halves) for halves in world.memory]
    memory[actor.slot][actor.step - 1] = actor.generation
    written = world._replace(memory=tuple((first, second) for first, second in memory))
    yield _with_actor(written, number, actor._replace(step=actor.step + 1))


def _publish(world: World, number: int, actor: Actor) -> Iterator[World]:
    slot = world.slots[actor.slot]
    owner = SlotOwner(number, 0, actor.attempt)
    published = slots.publish(slot, actor.generation, owner, size=2, checksum=None, schema_bytes=0)
    done = actor._replace(todo=actor.todo - 1, step=0, lapsed=False)
    if isinstance(published, RingSlot):
        world = world._replace(refs=world.refs | {(actor.slot, actor.generation)})
    yield _with_actor(_with_slot(world, actor.slot, _or_late(slot, published)), number, done)


def _claim(world: World, number: int, actor: Actor) -> Iterator[World]:
    """Claims any ref that was ever published: a real reader may have kept it for any time."""
    for index, generation in sorted(world.refs):
        attempt = actor.attempt + 1
        slot = current(world, index)
        claimed = slots.claim(slot, generation, SlotOwner(number, 0, attempt), LEASE_NS)
        if isinstance(claimed, RingSlot):
            moved = actor._replace(
                step=1, slot=index, generation=generation, attempt=attempt, seen=(0, 0), lapsed=False
            )
            yield _with_actor(_with_slot(world, index, claimed), number, moved)
        elif claimed in (Refusal.STALE, Refusal.CONSUMED):
            yield _with_actor(_with_slot(world, index, slot), number, actor._replace(todo=actor.todo - 1))


def _glance(world: World, number: int, actor: Actor) -> Iterator[World]:
    """Looks without a step of the slot, and gives up a payload that is not ready."""
    for index, generation in sorted(world.refs):
        if (world.slots[index].state, world.slots[index].generation) == (State.READY, generation):
            yield _with_actor(world, number, actor._replace(step=1, slot=index, generation=generation, seen=(0, 0)))
        else:
            yield _with_actor(world, number, actor._replace(todo=actor.todo - 1))


def _take(world: World, number: int, actor: Actor) -> Iterator[World]:
    """The reader returns its copy if it could still take the payload."""
    slot = current(world, actor.slot)
    for consumed in (True, False):
        taken = slots.take(slot, actor.generation, slot.size, consumed=consumed)
        is_wrong = (world.trusting or isinstance(taken, RingSlot)) and set(actor.seen) != {actor.generation}
        done = actor._replace(todo=actor.todo - 1, step=0, seen=(0, 0), lapsed=False)
        after = _with_slot(world, actor.slot, slot if isinstance(taken, Refusal) else taken)
        yield _with_actor(after._replace(wrong=world.wrong or is_wrong), number, done)


def _read_half(world: World, number: int, actor: Actor) -> Iterator[World]:
    seen = list(actor.seen)
    seen[actor.step - 1] = world.memory[actor.slot][actor.step - 1]
    yield _with_actor(world, number, actor._replace(step=actor.step + 1, seen=(seen[0], seen[1])))


def _finish(world: World, number: int, actor: Actor) -> Iterator[World]:
    """The reader returns what it has read if it owned the slot until now."""
    slot, owner = world.slots[actor.slot], SlotOwner(number, 0, actor.attempt)
    for end in (slots.consume, slots.release):
        ended = end(slot, actor.generation, owner)
        is_wrong = (world.trusting or isinstance(ended, RingSlot)) and set(actor.seen) != {actor.generation}
        done = actor._replace(todo=actor.todo - 1, step=0, seen=(0, 0), lapsed=False)
        after = _with_slot(world, actor.slot, _or_late(slot, ended))
        yield _with_actor(after._replace(wrong=world.wrong or is_wrong), number, done)


def _or_late(slot: RingSlot, outcome: RingSlot | Refusal) -> RingSlot:
    return slots.count_late(slot) if isinstance(outcome, Refusal) else outcome


def _with_slot(world: World, index: int, slot: RingSlot) -> World:
    return world._replace(slots=(*world.slots[:index], slot, *world.slots[index + 1 :]))


def _with_actor(world: World, number: int, actor: Actor) -> World:
    return world._replace(actors=(*world.actors[:number], actor, *world.actors[number + 1 :]))
