"""Which node gets which ranks. Survivors keep theirs; a spare takes the dead node's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from nvrx_slurm.jobspec.plan import RolePlan
from nvrx_slurm.journal.records import Assignment, RendezvousClosed


def seat(previous: Sequence[str], here: Collection[str], spares: Sequence[str], want: int) -> tuple[str, ...]:
    """The group-rank order of a new rendezvous: at most `want` nodes, none twice.

    A node of `previous` that is `here` keeps its seat; the seats of the others, and new ones up to `want`, go to
    `spares` in their order. With too few spares the rest move up, in order.
    """
    seats: list[str | None] = [name if name in here else None for name in previous[:want]]
    seats += [None] * (want - len(seats))
    seated = {name for name in seats if name}
    queue = iter([name for name in spares if name not in seated])
    return tuple(name for name in (taken or next(queue, None) for taken in seats) if name)


def passed_over(
    previous: Sequence[str],
    here: Collection[str],
    spares: Sequence[str],
    want: int,
    is_suspect: Callable[[str], bool],
) -> set[str]:
    """The nodes of `previous` that are here and lose their seats: evidence speaks against them, and a clean spare is
    left for each, once those that are missing have been replaced."""
    clean = [name for name in spares if name not in here and not is_suspect(name)]
    suspects = [name for name in previous if name in here and is_suspect(name)]
    missing = max(0, want - len(here))
    return set(suspects[: max(0, len(clean) - missing)])


def assignments(
    closed: RendezvousClosed, role: RolePlan, seen: Mapping[str, tuple[int, float]] | None = None
) -> Iterator[tuple[str, Assignment]]:
    """What each node of a closed rendezvous does, in group-rank order. `seen`: what the role's workers have taken so
    far."""
    for group_rank, node in enumerate(closed.nodes):
        yield (
            node,
            Assignment(
                group_rank=group_rank,
                first_rank=group_rank * role.workers_per_node,
                workers=role.workers_per_node,
                world_size=closed.world_size,
                group_world_size=len(closed.nodes),
                master_addr=closed.master_addr,
                master_port=closed.master_port,
                restart_count=closed.cycle,
                role=role.name,
                seen=dict(seen or {}),
            ),
        )
