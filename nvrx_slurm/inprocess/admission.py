"""Which run a group's name stands for: each run of a set of ranks has calls, and keys, of its own.

Two starts of a job may have one name: MASTER_ADDR and MASTER_PORT are often the same from run to run. The name's
*registry* (a call of its own in the store, `REGISTRY`) decides which of them has it, and from which number on that
run counts its calls. Its log has the runs in their order:

    RunStarted  a run with a number that no other one has, drawn at random, and its world size
    RollCall    all of its ranks have claimed their places; each of them answers now, for one may have died since
    RunFormed   all have answered

A rank claims its place in the latest run, by compare-and-set. Where another process holds it, or the world size is
another, that run is over if each of its processes is dead (on this host: the process has ended; elsewhere: no
heartbeat for the heartbeat timeout) or has left its call. Then a new run is appended: of several ranks that find
this, one succeeds, and all claim their places there. Otherwise this rank is refused.

Ranks of two runs that start at the same time look alike in the store. On one host the processes themselves tell:
where an older start of this rank runs (`environment.older_starts`), it claims first; and ranks that multiprocessing
has started belong to their parent's run.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence

import msgspec

from nvrx_slurm.errors import MalformedRecord
from nvrx_slurm.inprocess import environment
from nvrx_slurm.inprocess.barriers import MemberProcess, missing_ranks, pack, unpacked
from nvrx_slurm.inprocess.environment import RankIdentity
from nvrx_slurm.inprocess.exception import RestartError, StoreError, TimeoutError
from nvrx_slurm.inprocess.store import Connection, Store
from nvrx_slurm.util.decoding import decode
from nvrx_slurm.util.processes import process_space, runs

REGISTRY = 0  # the registry's call; the calls of runs have higher numbers
CALL_BITS = 12  # so many bits of a call's number count the calls of one run; those above them are the run's own
RUN_BITS = 40

LEFT, COMPLETED = b"left", b"completed"  # how a process has left the first call of its run
OLDER_S = 10.0  # the longest wait for an older start of this rank to claim its place
ENDING_S = 2.0  # how long a process of the run before may still take to end: it may have been killed just now
LOOK_S = 0.1

SAMPLED = 16  # the heartbeats of so many ranks on other hosts are looked at: as long as one beats, the run is alive


class RunStarted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="entry", tag="run"):
    """`first`: the number of the run's first call. `out`: the ranks that died in these processes' earlier calls.
    `parent`: of the process that started the run, if multiprocessing started that, in its `space`."""

    first: int
    world_size: int
    out: tuple[int, ...] = ()
    parent: str = ""
    space: str = ""


class RollCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="entry", tag="roll_call"):
    """All ranks of the run have claimed their places."""

    first: int


class RunFormed(msgspec.Struct, frozen=True, kw_only=True, tag_field="entry", tag="formed"):
    """All ranks of the run are here at one time."""

    first: int


_AnyEntry = RunStarted | RollCall | RunFormed
_encode = msgspec.json.Encoder().encode
_decoder: msgspec.json.Decoder[_AnyEntry] = msgspec.json.Decoder(_AnyEntry)


# The barriers of a run, by the number of its first call.
joined = "joined:{}".format  # where each rank claims its place
here = "here:{}".format  # those that hold their places
answered = "answered:{}".format  # those that have answered the roll call
gone = "gone:{}".format  # those that have left the run's first call, with `LEFT` or `COMPLETED`


class RunAdmission:
    """One rank's way into a run of its group. For the main thread.

    `within_s`: how long the ranks of a run wait for each other; `again`: the run that this process has left before,
    and `out`: the ranks that were dead by then.
    """

    def __init__(
        self,
        store: Store,
        own: RankIdentity,
        process: MemberProcess,
        *,
        within_s: float,
        heartbeat_timeout_s: float,
        interval_s: float,
        again: RunStarted | None = None,
        out: Sequence[int] = (),
    ) -> None:
        self._store, self._own, self._process = store, own, process
        self._within_s, self._heartbeat_timeout_s, self._interval_s = within_s, heartbeat_timeout_s, interval_s
        self._again, self._out = again, tuple(sorted(out))
        self._parent = environment.forking_parent()

    def enter(self) -> RunStarted:
        """Take this rank's place in a run, and wait for its other ranks.

        Raises StoreError where another run has the name; TimeoutError, which names the missing ranks; RestartError
        where the others have gone on without this process.
        """
        rank, payload = self._own.rank, pack(self._process)
        deadline = time.monotonic() + self._within_s
        with contextlib.closing(self._store.connect(self._own.group, REGISTRY)) as registry:
            if self._again is None:  # else this process has had its place before
                self._let_older_start_claim(registry)
            while True:
                entries = registry.read(0, 0.0)
                run = latest(entries)
                fits = run is not None and run != self._again and self._belongs(run)
                if run is not None and fits and registry.claim(joined(run.first), rank, payload) == payload:
                    if self._all_join(registry, run, len(entries), deadline):
                        return run
                    continue
                if run is not None and not self._is_over(registry, run, entries, deadline):
                    continue
                first = (secrets.randbits(RUN_BITS) + 1) << CALL_BITS
                fresh = RunStarted(
                    first=first,
                    world_size=self._own.world_size,
                    out=self._out,
                    parent=self._parent,
                    space=self._process.space,
                )
                # Of several ranks that append here one succeeds; the next look finds its run.
                registry.append(_encode(fresh), len(entries))

    def leave(self, run: RunStarted, how: bytes, dead: int) -> None:
        """This process has left the run's first call, of which so many members are dead: the name is free once all
        others have left. Where all of these have completed the call, the last one removes the registry's keys."""
        with contextlib.closing(self._store.connect(self._own.group, REGISTRY)) as registry:
            count = registry.arrive(gone(run.first), self._own.rank, how)
            if how == COMPLETED and count >= run.world_size - dead:
                ways = registry.arrivals(gone(run.first)).values()
                # One that has left may call again, and must find out that the others have completed.
                if all(each == COMPLETED for each in ways) and latest(registry.read(0, 0.0)) == run:
                    registry.clear()

    def _belongs(self, run: RunStarted) -> bool:
        is_other_launch = (
            run.space == self._process.space and run.parent != self._parent and "" not in (run.parent, self._parent)
        )
        return run.world_size == self._own.world_size and self._own.rank not in run.out and not is_other_launch

    def _let_older_start_claim(self, registry: Connection) -> None:
        """Where two runs of one name start at the same time on this host, let the older one's rank claim first."""
        until = time.monotonic() + OLDER_S
        older = environment.older_starts()
        while older and time.monotonic() < until:
            entries = registry.read(0, 0.0)
            if (run := latest(entries)) is not None:
                holder = unpacked(registry.arrivals(joined(run.first)), MemberProcess).get(self._own.rank)
                if holder is not None and (holder.pid, holder.began) in older:
                    return
            registry.read(len(entries), LOOK_S)
            older = {each for each in older if runs(*each)}

    def _all_join(self, registry: Connection, run: RunStarted, length: int, deadline: float) -> bool:
        """Wait until all ranks of the run have claimed their places. Returns False once another run follows it."""
        rank, first, is_called = self._own.rank, run.first, False
        while True:
            gate = answered(first) if is_called else here(first)
            if registry.arrive(gate, rank) >= run.world_size - len(run.out):
                # The last rank that comes appends it; it may have been appended already.
                registry.append(_encode(RunFormed(first=first) if is_called else RollCall(first=first)), length)
            for entry in map(_decoded, entries := registry.read(length, self._interval_s)):
                if entry == RunFormed(first=first):
                    return True
                if isinstance(entry, RunStarted):
                    return False
                is_called |= entry == RollCall(first=first)
            length += len(entries)
            # A rank that starts on another host can tell by these that this run is alive.
            registry.beat(rank, None)
            if time.monotonic() >= deadline:
                arrived = registry.arrivals(gate)
                missing = [each for each in range(run.world_size) if each not in arrived and each not in run.out]
                raise TimeoutError(f"waited {self._within_s:g} s for {missing_ranks(missing)} to call the function")

    def _is_over(self, registry: Connection, run: RunStarted, entries: Sequence[bytes], deadline: float) -> bool:
        """Whether each process of the run has left it, or is dead. Returns False if the registry has changed
        meanwhile. Raises StoreError if one is alive; RestartError if this process has left the run before, and the
        others go on."""
        until, length = time.monotonic() + ENDING_S, len(entries)
        is_formed = RunFormed(first=run.first) in map(_decoded, entries)
        while True:
            ways = registry.arrivals(gone(run.first))
            members = unpacked(registry.arrivals(joined(run.first)), MemberProcess)
            if not is_formed and self._belongs(run):
                # Ranks that started with this one may have joined it already; but without the one whose place this
                # is, it will never begin.
                members = {rank: each for rank, each in members.items() if rank == self._own.rank}
            left = {rank: process for rank, process in members.items() if rank not in ways and _may_run(process)}
            if run == self._again:
                if COMPLETED in ways.values() or (left and time.monotonic() >= deadline):
                    who = f"rank {self._own.rank}"
                    raise RestartError(f"{who} has left its group in an earlier call, and the others go on")
            elif left:
                near = {rank: each for rank, each in left.items() if each.space == self._process.space}
                if not near:
                    return self._are_silent(registry, run, left, length)
                if time.monotonic() >= until:
                    raise self._refused(run, near)
            if not left:
                return True
            if registry.read(length, LOOK_S):
                return False

    def _are_silent(
        self, registry: Connection, run: RunStarted, left: Mapping[int, MemberProcess], length: int
    ) -> bool:
        """Whether processes on other hosts send no heartbeat for the heartbeat timeout. As `_is_over`."""
        sample = sorted(left)[:: -(-len(left) // SAMPLED)]
        observer = max(run.world_size, self._own.world_size)

        def seen(call: Connection) -> tuple[list[int], int]:
            beats = [call.beat(observer, rank) + registry.beat(observer, rank) for rank in sample]
            return beats, len(call.read(0, 0.0))

        with contextlib.closing(self._store.connect(self._own.group, run.first)) as call:
            before, until = seen(call), time.monotonic() + self._heartbeat_timeout_s
            while time.monotonic() < until:
                if registry.read(length, self._interval_s):
                    return False
                if seen(call) != before:
                    raise self._refused(run, left)
        return True

    def _refused(self, run: RunStarted, alive: Mapping[int, MemberProcess]) -> StoreError:
        rank = self._own.rank if self._own.rank in alive else min(alive)
        other = alive[rank]
        return StoreError(
            f"another run has the name {self._own.group}: its rank {rank} of {run.world_size} is process {other.pid}"
            f" on {other.host}. Give each run a name of its own: another MASTER_PORT, or NVRX_INPROCESS_GROUP, the"
            " same for all of its ranks"
        )


def latest(entries: Sequence[bytes]) -> RunStarted | None:
    """The run that the name stands for now."""
    runs = [entry for entry in map(_decoded, entries) if isinstance(entry, RunStarted)]
    return runs[-1] if runs else None


def _decoded(data: bytes) -> _AnyEntry | None:
    try:
        return decode(_decoder.decode, data, "an entry of the registry")
    except MalformedRecord:
        return None


def _may_run(process: MemberProcess) -> bool:
    """Whether a process may be alive. Only one of this host, in this PID namespace, is known to be dead."""
    return process.space != process_space() or runs(process.pid, process.began)
