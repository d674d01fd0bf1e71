"""The store's process in a run: it is killed and frozen, and every commit that it takes is watched."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b, sha1
from typing import TYPE_CHECKING, Any

from nvrx_slurm.controller.mirror import in_order
from nvrx_slurm.errors import ForgedRecord
from nvrx_slurm.journal.records import Entry, Tick, unpack_entry
from nvrx_slurm.lab.simulation.aims import BEFORE, LATE, UNANSWERED
from nvrx_slurm.lab.simulation.process import SimulatedProcess
from nvrx_slurm.lab.simulation.sockets import RESET, Service, ServiceLink
from nvrx_slurm.lab.simulation.valkey_client import SOCKET_S, MemoryClient
from nvrx_slurm.lab.simulation.valkey_keyspace import encoded, identity_of
from nvrx_slurm.lab.simulation.valkey_server import Command, MemoryServer, ServerAnswer
from nvrx_slurm.store.client import script_text
from nvrx_slurm.store.sealing import NUMBER_BYTES, claimed_number
from nvrx_slurm.util.job_key import SIGNATURE_BYTES, JobKey

if TYPE_CHECKING:
    from nvrx_slurm.lab.simulation.run import SimulationRun

INBOX = ":inbox"
# Where the keys of a commit name them (`store/lua/commit.lua`).
SHUTDOWN, RENDEZVOUS_KEYS = 5, 8


@dataclass(frozen=True, slots=True)
class CommitFault:
    """What happens at the first commit that this `can_happen` to, `after` so many more: `do` something to the
    controller. A LATE commit arrives `late_by` commits after the take-over of the next."""

    after: int
    moment: int
    do: Callable[[], object] = lambda: None
    late_by: int = 0
    can_happen: Callable[[], bool] = lambda: True


@dataclass(slots=True)
class _LateCommit:
    """On its way. `commits_before`: so many of the next controller come before it."""

    arrive: Callable[[], None]
    commits_before: int
    is_overtaken: bool = False


class SimulatedKey(JobKey):
    """A job's key whose signatures cost a tenth: by BLAKE2 with a key, in place of HMAC-SHA256."""

    def __init__(self, token: str) -> None:
        super().__init__(token)
        self._blake2 = blake2b(digest_size=SIGNATURE_BYTES, key=self.derive("records"))

    def _signature(self, place: str, data: bytes) -> bytes:
        signature = self._blake2.copy()
        signature.update(b"%d %b%b" % (len(place), place.encode(), data))
        return signature.digest()


class WatchedStore(MemoryServer):
    """A run's in-memory server, and the process that it is."""

    def __init__(self, run: SimulationRun) -> None:
        super().__init__(run.store_clock)
        self._job, self._loop, self._promises, self._aims = run, run.loop, run.promises, run.aims
        self._service = Service(run.network, run.HOST)
        self._is_removed = self._has_lost_data = False
        self._faults: list[CommitFault] = []
        self._sent: Command | None = None  # the last commit that the aimed acts saw coming
        self._commits = 0
        self._late: list[_LateCommit] = []
        self._posted: deque[tuple[bytes, float]] = deque()  # inbox items that no commit accounts for → when they came
        self._joined: set[bytes | str] = set()
        self.process: SimulatedProcess = self._begin()

    def client(self, host: str, socket_s: float = SOCKET_S) -> MemoryClient:
        """A client on a host, which reaches this server over the network."""
        return MemoryClient(self, link=ServiceLink(host, self._service), socket_s=socket_s)

    # ---- what the adversary does

    def restart(self, down_s: float, *, keeps_data: bool = True) -> None:
        """Its process is killed, and started again by the batch host; without its data, where it had no file."""
        if self.up:
            self.stop()
            self.process.kill()
            if not keeps_data:
                self._lose_data()
                self._has_lost_data = True
            self._loop.call_outside(down_s, self._begin_again)

    def go_down(self, *, keeps_data: bool) -> None:
        """The job's generation has ended: nothing starts its process before `come_up`. An orderly end removes its
        data, too."""
        self.stop()
        self._is_removed = True
        self._late.clear()
        if not keeps_data:
            self._lose_data()
            self._has_lost_data = False

    def come_up(self) -> None:
        """The next generation starts it."""
        self._is_removed = False
        self._begin_again()

    def at_commit(self, fault: CommitFault) -> None:
        """From now on."""
        self._faults.append(replace(fault, after=self._commits + fault.after))

    def _lose_data(self) -> None:
        self.lose_data()
        self._posted.clear()
        self._joined.clear()

    def _begin_again(self) -> None:
        if not self.up and not self._is_removed:
            self.process = self._begin()
            self.start()

    def _begin(self) -> SimulatedProcess:
        process = SimulatedProcess(self._loop, "store")
        self._service.served_by(process)
        return process

    # ---- what it does itself

    def handle(self, password: str | None, commands: Sequence[Command], answer: ServerAnswer) -> None:
        if commands[0][0] != "evalsha":  # no commit: nothing is aimed at it, and no fault meets it
            super().handle(password, commands, answer)
            return
        # One event, however often it is sent: again after a wait, or since a new store did not know the script.
        if self._aims.armed and _is_script(commands[0], "commit") and commands[0] != self._sent:
            self._sent = commands[0]
            entries = _entries(commands[0])
            if self._aims.sees((unpack_entry(entry).record for entry in entries), "before"):
                # The act is the next step, and the commit the one after it, if the store still runs then.
                self.process.call_later(0.0, self._handle, password, commands, answer)
                return
        self._handle(password, commands, answer)

    def _handle(self, password: str | None, commands: Sequence[Command], answer: ServerAnswer) -> None:
        fault = None
        if _is_script(commands[0], "commit"):
            self._commits += 1
            fault = next((each for each in self._faults if each.after < self._commits and each.can_happen()), None)
        if fault is None:
            super().handle(password, commands, answer)
            return
        self._faults.remove(fault)
        self._loop.call_outside(0.0, fault.do)
        if fault.moment == LATE:
            self._late.append(_LateCommit(partial(super().handle, password, commands, answer), fault.late_by))
        elif fault.moment == BEFORE:
            answer(ConnectionResetError(RESET))
        elif fault.moment == UNANSWERED:  # taken, and the sender does not know
            super().handle(password, commands, lambda reply: answer(ConnectionResetError(RESET)))
        else:
            super().handle(password, commands, answer)

    def _added(self, key: str) -> None:
        super()._added(key)
        if key.endswith(INBOX):
            [(identity, fields)] = self.data.xrevrange(key, count=1)
            try:
                packed = self._job.key.verify(key, fields[1])
            except ForgedRecord:
                return  # the controller sets it aside, and no commit accounts for it
            at = self._clock.wall()
            self._posted.append((identity, at))
            self._promises.arrived(packed, at)

    def _run(self, command: Command) -> Any:
        """Carry a command out, and show the promises what it has changed."""
        posted = len(self._posted)
        reply, name = super()._run(command), command[0]
        if name == "xadd":
            # Only heartbeats have this field: what users type into a command is added by XADD, too.
            if "who" in command[1][1] and not isinstance(reply, Exception):
                self._job.contact.heard(command[1][1]["who"])
        elif name != "evalsha" or isinstance(reply, Exception):
            pass
        elif _is_script(command, "acquire") and reply[0] != 0:
            if self._has_lost_data:
                self._has_lost_data = False
                if copy := in_order(self._job.copy):
                    self._promises.go_on_from(copy)
                else:  # nothing of the job is known, nor which epochs were given
                    self._promises.begin_with(copy)
            self._promises.acquired(int(reply[0]))
            # What is on its way was sent by the controller before: from now on commits of the next one are counted.
            for late in self._late:
                late.is_overtaken = True
            self._deliver_late()
        elif _is_script(command, "join"):
            incarnation = command[1][-1]
            if len(self._posted) > posted and incarnation in self._joined:
                self._promises.joined_twice(incarnation)
            self._joined.add(incarnation)
        elif _is_script(command, "commit") and reply[0] == b"ok":
            _, many, *words = command[1]
            keys, args = words[:many], words[many:]
            # In the order of `store/lua/commit.lua`'s arguments: journal entries, orders, the shutdown.
            entries = int(args[5])
            begun = len(self._promises.journal)
            self._promises.committed(int(args[0]), _entries(command), self._loop.time())
            taken = self._promises.journal[begun:]
            self._check_deadlines(taken)
            if args[2] != "":
                read = identity_of(encoded(args[2]))
                while self._posted and identity_of(self._posted[0][0]) <= read:
                    self._posted.popleft()
            if self._aims.armed:
                self._aims.sees([entry.record for entry in taken], "after")
            for order in args[7 + entries : 7 + entries + int(args[6 + entries])]:
                packed = order[SIGNATURE_BYTES + NUMBER_BYTES :]
                self._promises.numbered(claimed_number(order))
                self._promises.ordered(packed, [len(self.data.hgetall(key)) for key in keys[RENDEZVOUS_KEYS:]])
            if args[3] != "":
                sealed = self.data.get(keys[SHUTDOWN])
                self._promises.shutdown_stands(sealed and sealed[SIGNATURE_BYTES:])
            self._deliver_late()
        return reply

    def _check_deadlines(self, entries: Sequence[Entry]) -> None:
        """A deadline is judged when the controller has read what is in the inbox."""
        for entry in entries:
            if isinstance(entry.record, Tick) and self._posted:
                self._promises.judged(entry.t, entry.t - self._posted[0][1])

    def _deliver_late(self) -> None:
        """One more commit, or the take-over, has come before those that are on their way."""
        for late in [late for late in self._late if late.is_overtaken]:
            if late.commits_before == 0:
                self._late.remove(late)
                self._loop.call_outside(0.0, late.arrive)
            late.commits_before -= 1


def _entries(commit: Command) -> list[bytes]:
    """The packed journal entries of a commit."""
    _, keys, *words = commit[1]
    first = keys + 6
    return [entry[SIGNATURE_BYTES:] for entry in words[first : first + int(words[first - 1])]]


_SHAS = {name: sha1(script_text(name).encode()).hexdigest() for name in ("acquire", "commit", "join")}


def _is_script(command: Command, name: str) -> bool:
    return command[0] == "evalsha" and command[1][0] == _SHAS[name]
