"""Mutants of the two libraries for a worker's own process: restarts in process, and the transport of payloads."""

from __future__ import annotations

from ci.mutants.model import Edit, Mutant

INPROCESS = "nvrx_slurm/inprocess"
LEDGER, BARRIERS, GUARD = (f"{INPROCESS}/{name}.py" for name in ("ledger", "barriers", "monitor_guard"))
CYCLE, GROUP, RANK, CALL, INTERRUPTER, HEARTBEATS = (
    f"{INPROCESS}/{name}.py" for name in ("cycle", "group", "rank", "call", "interrupter", "monitor_heartbeats")
)
SLOTS, RETRYING, SERVER, PROTOCOL, FETCHING, POOL, RING_ACCESS = (
    f"nvrx_slurm/transport/{name}.py"
    for name in ("slots", "retrying", "server", "protocol", "fetching", "pool", "ring_access")
)

OF_HEARTBEATS = ("tests/unit/inprocess/test_monitor_heartbeats.py",)
OF_HISTORIES = ("tests/unit/lab/simulation/test_histories.py",)
OF_QUARANTINE = ("tests/unit/transport/test_quarantine.py",)

TESTS_OF = {
    LEDGER: ("tests/unit/inprocess/test_ledger.py",),
    BARRIERS: ("tests/unit/inprocess/test_barriers.py",),
    GUARD: ("tests/unit/inprocess/test_monitor_guard.py",),
    GROUP: ("tests/unit/inprocess/test_group.py",),
    SLOTS: ("tests/unit/transport/test_slots.py",),
    RETRYING: ("tests/unit/transport/test_retrying.py", "tests/unit/transport/test_retrying_ports.py"),
    POOL: ("tests/unit/transport/test_pool.py",),
}


def library(name: str, promise: str, *edits: Edit, tests: tuple[str, ...] = ()) -> Mutant:
    """`tests`: by default those of the edited file."""
    file = edits[0].file
    return Mutant(
        name, promise, edits, tests or TESTS_OF[file], "inprocess" if file.startswith(INPROCESS) else "transport"
    )


LIBRARIES = (
    library(
        "member-lost-twice",
        "a member is lost once",
        Edit(LEDGER, "return entry.member not in ledger.lost and 0", "return 0"),
    ),
    library(
        "barrier-of-another-phase",
        "a rank waits at no barrier in a phase that only its own next step ends",
        Edit(
            GROUP,
            "        while self.cycle.phase in barrier.phases:\n",
            "        began = self.cycle.phase\n        while self.cycle.phase is began:\n",
        ),
    ),
    library(
        "completed-iteration-is-lost",
        "a completed iteration is not interrupted by a loss",
        Edit(
            LEDGER,
            "takes_part = starts_with_it or ledger.stage is IterationStage.RUNNING",
            "takes_part = starts_with_it or ledger.stage in (IterationStage.RUNNING, IterationStage.COMPLETED)",
        ),
    ),
    library(
        "seal-that-counts-a-lost-member",
        "an iteration is sealed with the members that are left",
        Edit(
            LEDGER,
            "stage is IterationStage.GATHERING and there\n",
            "stage is IterationStage.GATHERING and (there or True)\n",
        ),
    ),
    library(
        "late-completion-counts",
        "an iteration that was interrupted is not completed",
        Edit(
            LEDGER,
            "        case Completed():\n            return entry.iteration == ledger.iteration and",
            "        case Completed():\n            return",
        ),
    ),
    library(
        "interrupted-after-completion",
        "a completed iteration is not interrupted",
        Edit(
            LEDGER,
            "return is_current and stage in (IterationStage.STARTING, IterationStage.RUNNING)",
            "return is_current and stage is not IterationStage.GATHERING",
        ),
    ),
    library(
        "late-interruption-counts",
        "an interruption of an older iteration has no effect",
        Edit(
            LEDGER,
            "is_current = entry.iteration == ledger.iteration and entry.member not in ledger.lost",
            "is_current = entry.member not in ledger.lost",
        ),
    ),
    library(
        "discarded-rank-interrupts",
        "a rank that its assignment discards does not interrupt the others",
        Edit(
            LEDGER,
            "ledger.stage is IterationStage.STARTING and not discarded",
            "ledger.stage is IterationStage.STARTING",
        ),
    ),
    library(
        "next-member-is-lost",
        "a lost member is not watched: its successor is",
        Edit(
            LEDGER,
            "if (other := (member + step) % self.members) not in self.lost:",
            "if (other := (member + step) % self.members) is not None:",
        ),
    ),
    library(
        "two-ranks-of-one-number",
        "ranks that disagree about their world do not start",
        Edit(BARRIERS, "if {place.rank for place in places.values()} != set(range(len(places))):", "if False:"),
    ),
    library(
        "lowest-member-does-not-read",
        "a barrier closes when the member that arrived last is lost",
        Edit(BARRIERS, "return was_last or all(lower in seen.lost for lower in range(member))", "return was_last"),
    ),
    library(
        "hard-timeout-ignored",
        "a rank without progress for the hard timeout is killed",
        Edit(GUARD, "    if silent_s >= bounds.hard_s:\n", "    if silent_s >= 1000 * bounds.hard_s:\n"),
    ),
    library(
        "soft-timeout-again-and-again",
        "an iteration's soft timeout is recorded once",
        Edit(
            GUARD,
            "if silent_s >= bounds.soft_s and guard.recorded != watched.iteration:",
            "if silent_s >= bounds.soft_s:",
        ),
    ),
    # ---- transport
    library(
        "writer-takes-a-slot-that-is-read",
        "a slot that is read is not overwritten",
        Edit(SLOTS, "    if slot.state in (WRITING, READING):\n", "    if slot.state is WRITING:\n"),
    ),
    library(
        "unread-payload-overwritten",
        "an unread payload is overwritten only where that is allowed",
        Edit(SLOTS, "    if slot.state is READY and not overwrite:\n", "    if False:\n"),
    ),
    library(
        "another-payload-claimed",
        "a ref never brings another payload's bytes",
        Edit(SLOTS, "    if generation is not None and generation != slot.generation:\n", "    if False:\n"),
    ),
    library(
        "two-readers-of-one-slot",
        "a read has one owner",
        Edit(
            SLOTS,
            "    if slot.state is READY:\n        return replace(slot, state=READING,",
            "    if slot.state in (READY, READING):\n        return replace(slot, state=READING,",
        ),
    ),
    library(
        "any-owner-ends-a-read",
        "only its owner ends a read",
        Edit(
            SLOTS,
            "return slot.state is state and slot.generation == generation and slot.owner == owner",
            "return slot.state is state and slot.generation == generation",
        ),
    ),
    library(
        "lapsed-read-loses-the-payload",
        "a read that lapsed leaves its payload to others",
        Edit(SLOTS, "    state = FREE if slot.state is WRITING else READY\n", "    state = FREE\n"),
    ),
    library(
        "lease-never-lapses",
        "every slot is freed: a reader's lease lapses",
        Edit(SLOTS, "return owner_is_dead or now_ns >= slot.lease_ns", "return owner_is_dead"),
    ),
    library(
        "living-writer-loses-its-slot",
        "a writer that stands still keeps its slot",
        Edit(SLOTS, "    return slot.state is WRITING and owner_is_dead\n", "    return slot.state is WRITING\n"),
    ),
    library(
        "copied-payload-of-another-size",
        "what was copied is what is acknowledged",
        Edit(
            SLOTS,
            "if slot.state is not READY or slot.generation != generation or slot.size != size:",
            "if slot.state is not READY:",
        ),
    ),
    library(
        "deadline-ignored",
        "a read ends at its deadline",
        Edit(RETRYING, "        if now >= self._deadline:\n            return EndRead(None)\n", ""),
    ),
    library(
        "stale-ref-asked-again",
        "a stale ref ends the read",
        Edit(RETRYING, "        if outcome is AttemptOutcome.STALE:\n", "        if False:\n"),
    ),
    library(
        "calls-without-end",
        "a read gives up after its calls",
        Edit(RETRYING, "if self._calls >= self._limits.calls or not self._tried:", "if not self._tried:"),
    ),
    library(
        "quarantine-does-not-grow",
        "each fault of a port lengthens its quarantine",
        Edit(RETRYING, "    failures = health.failures + 1\n", "    failures = 1\n"),
    ),
    # ---- what the libraries' simulations are for: whole calls and reads, with their threads
    library(
        "barrier-counts-lost-members",
        "no barrier closes without each member that is left",
        Edit(
            GROUP,
            "present = {member: data for member, data in here.items() if member not in seen.lost}",
            "present = dict(here)",
        ),
    ),
    library(
        "completed-without-one",
        "an iteration is completed by all of its active ranks",
        Edit(RANK, "lambda _: active, lambda _: completed", "lambda _: max(1, active - 1), lambda _: completed"),
        tests=OF_HISTORIES,
    ),
    library(
        "loss-of-a-starting-rank",
        "all ranks agree on which iteration was interrupted",
        Edit(
            LEDGER,
            "takes_part = starts_with_it or ledger.stage is IterationStage.RUNNING",
            "takes_part = ledger.stage is IterationStage.RUNNING",
        ),
    ),
    library(
        "lease-counts-from-the-reply",
        "a member that is recorded as dead is dead",
        Edit(
            HEARTBEATS,
            "self._lease.renew(asked_at)",
            "self._lease.renew(time.monotonic() + 0.5 * self._options.heartbeat_timeout_s)",
        ),
        tests=OF_HISTORIES,
    ),
    library(
        "frozen-monitor-lives",
        "a monitor that is frozen is killed by the kernel when its lease is over, and its rank with it",
        Edit(
            HEARTBEATS,
            "        self._self_fence.arm(sent_at + SELF_FENCE_SHARE * self._timeout_s - time.monotonic())\n",
            "",
        ),
        tests=OF_HISTORIES,
    ),
    library(
        "unfit-rank-is-recorded-alive",
        "a rank that is unfit is recorded once its process is dead",
        Edit(
            CALL,
            "        if self._rank.unfit:\n            self._monitor",
            "        if False:\n            self._monitor",
        ),
        tests=OF_HISTORIES,
    ),
    library(
        "waiting-rank-is-not-interrupted",
        "a rank that has returned restarts with the others",
        Edit(CYCLE, "    (CyclePhase.COMPLETING, Event.FAILED): CyclePhase.INTERRUPTED,\n", ""),
        tests=OF_HISTORIES,
    ),
    library(
        "barrier-without-bound",
        "every rank that waits leaves within its bound",
        Edit(GROUP, "if not self._wait_until(has_news, until):", "if not self._wait_until(has_news, math.inf):"),
    ),
    library(
        "function-is-not-interrupted",
        "once faults stop the ranks that are left complete",
        Edit(INTERRUPTER, "                self._region.interrupt(again_s=self._again_s)\n", ""),
        tests=OF_HISTORIES,
    ),
    library(
        "lost-host-one-by-one",
        "the ranks of a lost host are found together",
        Edit(HEARTBEATS, "        if last.seen_at - last.since >= patience_s:\n", "        if False:\n"),
        tests=OF_HEARTBEATS,
    ),
    library(
        "generation-is-used-again",
        "a ref never gives another payload's bytes",
        Edit(
            RING_ACCESS,
            "generation = max(self.memory.latest_generation(), slot.generation) + 1",
            "generation = max(self.memory.latest_generation(), slot.generation) // 2 + 1",
        ),
        tests=("tests/unit/transport/test_ring.py",),
    ),
    library(
        "checksum-is-not-compared",
        "the bytes that were written, or an error",
        Edit(PROTOCOL, "    if is_other or (ref.checksum and seen", "    if False and (ref.checksum and seen"),
        tests=("tests/unit/transport/test_protocol.py",),
    ),
    library(
        "payload-is-freed-when-sent",
        "no unread payload is lost while its producer lives",
        Edit(SERVER, "    is_taken = False\n    try:", "    is_taken = True\n    try:"),
        tests=OF_HISTORIES,
    ),
    library(
        "taken-payload-is-left-to-others",
        "without a fault each payload is read once",
        Edit(
            FETCHING,
            "verdict = protocol.AckVerdict.KEPT if keep else protocol.AckVerdict.TAKEN",
            "verdict = protocol.AckVerdict.KEPT",
        ),
        tests=OF_HISTORIES,
    ),
    library(
        "attempt-beyond-the-deadline",
        "each read ends by its deadline",
        Edit(
            RETRYING,
            "until = min(self._deadline, now + answer_s + payload_s)",
            "until = now + answer_s + payload_s",
        ),
    ),
    library(
        "dead-reader-keeps-its-slot",
        "no slot stays blocked",
        Edit(SLOTS, "return owner_is_dead or now_ns >= slot.lease_ns", "return False"),
    ),
    library(
        "drop-is-not-counted",
        "every payload is counted once",
        Edit(SLOTS, 'counts = _add(slot, "dropped") if slot.state is READY else slot.counts', "counts = slot.counts"),
    ),
    library(
        "quarantine-without-end",
        "a port's quarantine ends",
        Edit(RETRYING, "return now < self.sick_until", "return self.sick_until > 0"),
        tests=OF_QUARANTINE,
    ),
    library(
        "success-is-not-forgiven",
        "one success ends a port's history of faults",
        Edit(
            FETCHING, "                        self._health.pop(step.port, None)\n", "                        pass\n"
        ),
        tests=OF_QUARANTINE,
    ),
    library(
        "lost-ack-is-forgotten",
        "with its next read of a ring a reader confirms what it has read there before",
        Edit(
            POOL,
            "        if connection.unconfirmed is not None:\n            self._unc",
            "        if False:\n            self._unc",
        ),
    ),
)
