"""Every key of a job in the store: name, type, who writes, who reads, how long it lives.

The table in `docs/store.md` is made of this module (`python -m ci.pages`). The job's id stands in braces, so
that a Redis Cluster keeps all of a job in one slot. A record in a stream is its field `m`.
"""

from __future__ import annotations

import msgspec


class KeyInfo(msgspec.Struct, frozen=True):
    """One row of the table in `docs/store.md`."""

    pattern: str
    kind: str
    written_by: str
    read_by: str
    lifetime: str
    holds: str


# ruff: noqa: E501  (a table reads better in one line a row)
CATALOGUE: tuple[KeyInfo, ...] = (
    KeyInfo("epoch", "integer", "controller", "controller", "job", "The newest controller's epoch; fences all older ones."),
    KeyInfo("lease", "string", "controller", "agents", "3 heartbeat intervals", "The newest controller's generation, host and process id, while it runs."),
    KeyInfo("controller", "string", "controller", "agents", "job", "`ControllerUp`: where the controller accepts liveness connections."),
    KeyInfo("inbox", "stream", "agents, batch host, cli", "controller", "trimmed once read", "Facts, requests of users, and what agents have found in their logs (which is not journaled)."),
    KeyInfo("cursor", "string", "controller", "controller", "job", "Id of the last inbox item that the journal accounts for."),
    KeyInfo("journal", "stream", "controller", "the next controller, cli", "job", "`Entry`s: facts and decisions, numbered without a gap."),
    KeyInfo("journal_n", "integer", "controller", "controller", "job", "Number of the last journal entry."),
    KeyInfo("orders", "stream", "controller", "agents", "trimmed to about 4,096", "Decisions that agents act on."),
    KeyInfo("joins", "hash", "agents", "agents", "job", "Incarnation → id of the last order before it joined: a join that is tried again is the same one."),
    KeyInfo("rendezvous:<replica>:<gen>:<cycle>", "hash", "controller", "agents", "1 hour after it closes", "Node → `Assignment`; an agent reads its own field only."),
    KeyInfo("shutdown:<gen>", "string", "controller", "all", "job", "`Shutdown`, set once."),
    KeyInfo("beats", "stream", "agents", "controller, cli", "trimmed to about 2 per node", "`Heartbeat`s, each behind a field `who`: its incarnation."),
    KeyInfo("command:<request>:in", "stream", "cli", "the agent that runs the command", "10 minutes after the last message", "`AskerWord`s: keep-alives and signals of a user who runs a command (`nvrx-slurm exec`), each with a number that grows."),
    KeyInfo("command:<request>:out", "stream", "the agent that runs the command", "cli", "the same; trimmed to 128", "`CommandWord`s: what the command prints, and how it ended."),
    KeyInfo("inprocess:<group>:<call>:log", "stream", "ranks and their monitors", "ranks and their monitors", "1 hour after the last sign of life", "What a group that restarts in process has agreed on, as JSON; an entry's id is its place, from `1-0`. Call 0 is the registry of the runs of that name; the calls of each run count from a number of its own. Without a job these four begin with `nvrx:{<group>}:inprocess:<call>:`."),
    KeyInfo("inprocess:<group>:<call>:gate:<gate>", "hash", "ranks", "ranks and their monitors", "the same; an older barrier is removed earlier", "A barrier: member → the data that it arrived with."),
    KeyInfo("inprocess:<group>:<call>:gates", "list", "ranks", "ranks", "the same", "The barriers that exist, oldest first."),
    KeyInfo("inprocess:<group>:<call>:beats", "hash", "monitors", "monitors", "the same", "Member → how many heartbeats it has sent."),
    KeyInfo("payloads:<topic>", "stream", "producers of payloads", "their consumers", "1 day after the last publish, lookup or follow; trimmed to about 65,536", "Where each payload is, and who has published it: `nvrx_slurm.transport.Published`."),
)  # fmt: skip


def in_namespace(namespace: str | None, job: str) -> str:
    """The name that a job has in the keys of a site's store: `alice/7-3f2a` with `store.namespace`."""
    return f"{namespace}/{job}" if namespace else job


class Keys:
    """The key names of one job."""

    def __init__(self, job: str) -> None:
        self._prefix = f"nvrx:{{{job}}}:"
        self.epoch = self._prefix + "epoch"
        self.lease = self._prefix + "lease"
        self.controller = self._prefix + "controller"
        self.inbox = self._prefix + "inbox"
        self.cursor = self._prefix + "cursor"
        self.journal = self._prefix + "journal"
        self.journal_n = self._prefix + "journal_n"
        self.orders = self._prefix + "orders"
        self.joins = self._prefix + "joins"
        self.beats = self._prefix + "beats"

    def all(self, generation: int) -> tuple[str, ...]:
        """Every key but the rendezvous, which expire by themselves."""
        streams = (self.inbox, self.journal, self.orders, self.beats)
        values = (self.epoch, self.lease, self.controller, self.cursor, self.journal_n, self.joins)
        return (*streams, *values, *(self.shutdown(each) for each in range(generation + 1)))

    def rendezvous(self, replica: str, generation: int, cycle: int) -> str:
        return f"{self._prefix}rendezvous:{replica}:{generation}:{cycle}"

    def command_in(self, request: str) -> str:
        return f"{self._prefix}command:{request}:in"

    def command_out(self, request: str) -> str:
        return f"{self._prefix}command:{request}:out"

    def shutdown(self, generation: int) -> str:
        return f"{self._prefix}shutdown:{generation}"


class InprocessKeys:
    """The key names of one call of a group that restarts in process: below its job's, or in a store without a job."""

    def __init__(self, group: str, call: int, *, job: str | None) -> None:
        self._prefix = f"nvrx:{{{job}}}:inprocess:{group}:{call}:" if job else f"nvrx:{{{group}}}:inprocess:{call}:"
        self.log = self._prefix + "log"
        self.gates = self._prefix + "gates"
        self.beats = self._prefix + "beats"

    def gate(self, name: str) -> str:
        return f"{self._prefix}gate:{name}"
