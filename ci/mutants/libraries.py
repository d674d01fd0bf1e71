"""Mutants of the two libraries for a worker's own process: restarts in process, and the transport of payloads."""

from __future__ import annotations

from ci.mutants.model import Edit, Mutant

INPROCESS = "nvrx_slurm/inprocess"
LEDGER, BARRIERS, GUARD = (f"{INPROCESS}/{name}.py" for name in ("ledger", "barriers", "monitor_guard"))
SLOTS, RETRYING = "nvrx_slurm/transport/slots.py", "nvrx_slurm/transport/retrying.py"

OF_LEDGER = ("tests/unit/inprocess/test_ledger.py",)
OF_BARRIERS = ("tests/unit/inprocess/test_barriers.py",)
OF_GUARD = ("tests/unit/inprocess/test_monitor_guard.py",)
OF_SLOTS = ("tests/unit/transport/test_slots.py",)
OF_RETRYING = ("tests/unit/transport/test_retrying.py", "tests/unit/transport/test_retrying_ports.py")


def library(name: str, promise: str, *edits: Edit, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name, promise, edits, tests, "inprocess" if edits[0].file.startswith(INPROCESS) else "transport")


LIBRARIES = (
    library(
        "member-lost-twice",
        "a member is lost once",
        Edit(LEDGER, "return entry.member not in ledger.lost and 0", "return 0"),
        tests=OF_LEDGER,
    ),
    library(
        "completed-iteration-is-lost",
        "a completed iteration is not interrupted by a loss",
        Edit(
            LEDGER,
            "takes_part = starts_with_it or ledger.stage is IterationStage.RUNNING",
            "takes_part = starts_with_it or ledger.stage in (IterationStage.RUNNING, IterationStage.COMPLETED)",
        ),
        tests=OF_LEDGER,
    ),
    library(
        "seal-that-counts-a-lost-member",
        "an iteration is sealed with the members that are left",
        Edit(
            LEDGER,
            "stage is IterationStage.GATHERING and there\n",
            "stage is IterationStage.GATHERING and (there or True)\n",
        ),
        tests=OF_LEDGER,
    ),
    library(
        "late-completion-counts",
        "an iteration that was interrupted is not completed",
        Edit(
            LEDGER,
            "        case Completed():\n            return entry.iteration == ledger.iteration and",
            "        case Completed():\n            return",
        ),
        tests=OF_LEDGER,
    ),
    library(
        "interrupted-after-completion",
        "a completed iteration is not interrupted",
        Edit(
            LEDGER,
            "return is_current and stage in (IterationStage.STARTING, IterationStage.RUNNING)",
            "return is_current and stage is not IterationStage.GATHERING",
        ),
        tests=OF_LEDGER,
    ),
    library(
        "late-interruption-counts",
        "an interruption of an older iteration has no effect",
        Edit(
            LEDGER,
            "is_current = entry.iteration == ledger.iteration and entry.member not in ledger.lost",
            "is_current = entry.member not in ledger.lost",
        ),
        tests=OF_LEDGER,
    ),
    library(
        "discarded-rank-interrupts",
        "a rank that its assignment discards does not interrupt the others",
        Edit(
            LEDGER,
            "ledger.stage is IterationStage.STARTING and not discarded",
            "ledger.stage is IterationStage.STARTING",
        ),
        tests=OF_LEDGER,
    ),
    library(
        "next-member-is-lost",
        "a lost member is not watched: its successor is",
        Edit(
            LEDGER,
            "if (other := (member + step) % self.members) not in self.lost:",
            "if (other := (member + step) % self.members) is not None:",
        ),
        tests=OF_LEDGER,
    ),
    library(
        "two-ranks-of-one-number",
        "ranks that disagree about their world do not start",
        Edit(BARRIERS, "if {place.rank for place in places.values()} != set(range(len(places))):", "if False:"),
        tests=OF_BARRIERS,
    ),
    library(
        "lowest-member-does-not-read",
        "a barrier closes when the member that arrived last is lost",
        Edit(BARRIERS, "return was_last or all(lower in seen.lost for lower in range(member))", "return was_last"),
        tests=OF_BARRIERS,
    ),
    library(
        "hard-timeout-ignored",
        "a rank without progress for the hard timeout is killed",
        Edit(GUARD, "    if silent_s >= bounds.hard_s:\n", "    if silent_s >= 1000 * bounds.hard_s:\n"),
        tests=OF_GUARD,
    ),
    library(
        "soft-timeout-again-and-again",
        "an iteration's soft timeout is recorded once",
        Edit(
            GUARD,
            "if silent_s >= bounds.soft_s and guard.recorded != watched.iteration:",
            "if silent_s >= bounds.soft_s:",
        ),
        tests=OF_GUARD,
    ),
    # ---- transport
    library(
        "writer-takes-a-slot-that-is-read",
        "a slot that is read is not overwritten",
        Edit(SLOTS, "    if slot.state in (WRITING, READING):\n", "    if slot.state is WRITING:\n"),
        tests=OF_SLOTS,
    ),
    library(
        "unread-payload-overwritten",
        "an unread payload is overwritten only where that is allowed",
        Edit(SLOTS, "    if slot.state is READY and not overwrite:\n", "    if False:\n"),
        tests=OF_SLOTS,
    ),
    library(
        "another-payload-claimed",
        "a ref never brings another payload's bytes",
        Edit(SLOTS, "    if generation is not None and generation != slot.generation:\n", "    if False:\n"),
        tests=OF_SLOTS,
    ),
    library(
        "two-readers-of-one-slot",
        "a read has one owner",
        Edit(
            SLOTS,
            "    if slot.state is READY:\n        return replace(slot, state=READING,",
            "    if slot.state in (READY, READING):\n        return replace(slot, state=READING,",
        ),
        tests=OF_SLOTS,
    ),
    library(
        "any-owner-ends-a-read",
        "only its owner ends a read",
        Edit(
            SLOTS,
            "return slot.state is state and slot.generation == generation and slot.owner == owner",
            "return slot.state is state and slot.generation == generation",
        ),
        tests=OF_SLOTS,
    ),
    library(
        "lapsed-read-loses-the-payload",
        "a read that lapsed leaves its payload to others",
        Edit(SLOTS, "    state = FREE if slot.state is WRITING else READY\n", "    state = FREE\n"),
        tests=OF_SLOTS,
    ),
    library(
        "lease-never-lapses",
        "every slot is freed: a reader's lease lapses",
        Edit(SLOTS, "return owner_is_dead or now_ns >= slot.lease_ns", "return owner_is_dead"),
        tests=OF_SLOTS,
    ),
    library(
        "living-writer-loses-its-slot",
        "a writer that stands still keeps its slot",
        Edit(SLOTS, "    return slot.state is WRITING and owner_is_dead\n", "    return slot.state is WRITING\n"),
        tests=OF_SLOTS,
    ),
    library(
        "copied-payload-of-another-size",
        "what was copied is what is acknowledged",
        Edit(
            SLOTS,
            "if slot.state is not READY or slot.generation != generation or slot.size != size:",
            "if slot.state is not READY:",
        ),
        tests=OF_SLOTS,
    ),
    library(
        "deadline-ignored",
        "a read ends at its deadline",
        Edit(RETRYING, "        if now >= self._deadline:\n            return EndRead(None)\n", ""),
        tests=OF_RETRYING,
    ),
    library(
        "stale-ref-asked-again",
        "a stale ref ends the read",
        Edit(RETRYING, "        if outcome is AttemptOutcome.STALE:\n", "        if False:\n"),
        tests=OF_RETRYING,
    ),
    library(
        "calls-without-end",
        "a read gives up after its calls",
        Edit(RETRYING, "if self._calls >= self._limits.calls or not self._tried:", "if not self._tried:"),
        tests=OF_RETRYING,
    ),
    library(
        "quarantine-never-ends",
        "a port's quarantine ends",
        Edit(RETRYING, "        return now < self.sick_until\n", "        return self.failures > 0\n"),
        tests=OF_RETRYING,
    ),
    library(
        "quarantine-does-not-grow",
        "each fault of a port lengthens its quarantine",
        Edit(RETRYING, "    failures = health.failures + 1\n", "    failures = 1\n"),
        tests=OF_RETRYING,
    ),
)
