"""Each journal entry as one sentence: subject, verb, object. Pure."""

from __future__ import annotations

import shlex
from typing import Any, assert_never

import msgspec

from nvrx_slurm.journal import records
from nvrx_slurm.journal.records import AnyDecision, AnyRecord, Decision, Entry
from nvrx_slurm.journal.verdicts import Verdict
from nvrx_slurm.report.words import (
    at_step,
    event_name,
    how_started,
    isolation,
    names,
    numbers,
    phases_in_words,
    plural,
    ranks_of,
    ranks_wait,
    seconds,
    size,
    slurm_state,
    to_move,
    worker_end,
    worker_hang,
)
from nvrx_slurm.util.sanitize import one_line
from nvrx_slurm.util.signals import signal_name

MOST_PHASES = 3
SIGNALS: dict[records.SignalReason, str] = {
    "cancel": "the batch host was asked to cancel the job",
    "interrupt": "the batch host was interrupted",
    "hangup": "the terminal of the batch host was closed",
    "time_limit": "the job's time limit is near",
    "agents_gone": "no agent runs any more",
    "no_agents": "no agent can run in the job's container",
    "preempted": "Slurm takes the nodes back: the job is preempted or requeued",
    "lease_lapsed": "no client renewed the job's lease",
}
# Why a job is stopped, other than by its role's policy.
REASONS = {
    "attribution": " because a source of attribution says STOP",
    "progress": " because it makes no progress",
    "budget": " because its budget is spent",
}


def describe(record: AnyRecord) -> str:
    """The record as a sentence: `n2 was lost: connection to its agent closed, at step 80`."""
    match record:
        # These come from every node in every cycle, so nearly all entries are among the first three.
        case records.WorkersStarted():
            pids = ", ".join([f"{rank}={record.pids[rank]}" for rank in sorted(record.pids)])
            took = seconds(record.spawn_s)
            how = how_started(record.warm, record.cold, len(record.pids))
            started = f"{record.node} started its workers of {_cycle(record)} in {took}: rank=pid {pids}"
            return f"{started}; {how}" if how else started
        case records.Progress():
            return f"rank {record.rank} on {record.node} reported its first step of {_cycle(record)}, {record.step}"
        case records.NodeReady():
            lost = f"; {ranks_of(record.peers_lost)} had lost a peer" if record.peers_lost else ""
            if not record.teardown_s:
                return f"{record.node} is ready for {_cycle(record)}{lost}"
            # Not for which cycle: there is none if the replica has ended.
            stopped = f"{record.replica} cycle {record.cycle - 1} were stopped within {seconds(record.teardown_s)}"
            return f"{record.node} is ready again: its workers of {stopped}{lost}"
        case Decision():
            return _describe_decision(record)
        case records.JobStarted():
            again = f", generation {record.generation}," if record.generation else ""
            nodes = f"{plural(len(record.expected), 'node')}: {names(record.expected)}"
            return f"job {record.job} ({record.name}){again} started on {nodes}"
        case records.ControllerStarted():
            return f"process {record.pid} on {record.host} is the controller, with epoch {record.epoch}"
        case records.NodeJoined():
            return f"{record.node} joined at {record.addr}"
        case records.NodeLeft():
            survivors = f"; SIGKILL did not end processes {numbers(record.survivors)}" if record.survivors else ""
            return f"{record.node} left: {record.reason}{survivors}"
        case records.NodeLost():
            held = f"; {ranks_wait(record.safe_after_s)}" if record.safe_after_s else ""
            # A heartbeat is up to an interval older than the loss: `failed at` of `status` may know a later step.
            step = "" if record.step is None else f"; its last heartbeat said step {record.step}"
            return f"{record.node} was lost: {record.why}{step}{held}"
        case records.NodeIsolated():
            return f"{isolation(record)}, {_cycle(record)}"
        case records.NodeFenced():
            return f"{record.node}'s workers are proven dead: {record.proof}"
        case records.SlurmNodeState():
            return f"Slurm says of {record.node}: {slurm_state(record)}"
        case records.AgentsStarted():
            ended = "the agents' srun ended; " if record.step_ended else ""
            missing = f"; {names(record.missing)} did not answer" if record.missing else ""
            again = f" (attempt {record.attempt})" if record.attempt > 1 else ""
            return f"{ended}the batch host starts agents on {names(record.nodes)}{again}{missing}"
        case records.DumpAsked():
            return f"{record.by} asked for the stacks of {_dumped(record)} (request {record.request})"
        case records.RestartAsked():
            cycles = ", ".join(f"{replica} cycle {cycle}" for replica, cycle in record.cycles.items())
            return f"{record.by} asked for a restart of {cycles} (request {record.request})"
        case records.DrainAsked():
            force = ", by force" if record.force else ""
            return f"{record.by} asked to drain {record.node}{force} (request {record.request})"
        case records.UndrainAsked():
            return f"{record.by} asked to undrain {record.node} (request {record.request})"
        case records.CommandAsked():
            return f"{record.by} asked to run {record.argv[0]} beside rank {record.rank} (request {record.request})"
        case records.CommandEnded():
            how = record.error or f"exit code {record.exit_code}"
            how = how if record.signal is None else signal_name(record.signal)
            return f"request {record.request} ended on {record.node} after {seconds(record.took_s)}: {how}"
        case records.Signalled():
            return SIGNALS[record.reason] if record.by is None else f"{record.by} asked to cancel the job"
        case records.Terminating():
            return f"Slurm sent SIGTERM to {record.node}"
        case records.Suspending():
            return f"Slurm announced to {record.node} that it suspends the job"
        case records.NodeResumed():
            return f"{record.node} was resumed after {seconds(record.stood_still_s)}"
        case records.JobResumed(stood_still_s=0):
            return "the job was not suspended"
        case records.JobResumed():
            return f"the job was resumed after {seconds(record.stood_still_s)}"
        case records.Attributed(attribution=answer):
            fault = "" if answer.fault == "unknown" else f" ({answer.fault}, {answer.confidence:.0%} sure)"
            because = answer.problem or answer.explanation
            said = f"{answer.source} says {answer.verdict}{fault} of {_failed(record)}"
            return f"{said}, after {seconds(answer.latency_s)}{f': {because}' if because else ''}"
        case records.RecordsRefused():
            return f"the controller set aside {plural(record.count, 'record')} in {record.stream}: {record.why}"
        case records.DecisionsLate():
            return "the latest decisions were committed late: the controller or the store stood still"
        case records.StoreDataLost():
            return f"the store lost its data, {record.entries} of the journal's entries too; all agents join again"
        case records.Tick():
            return "a deadline passed"
        case records.Prewarmed():
            skipped = "".join(f"; without {name}: {why}" for name, why in sorted(record.skipped.items()))
            has = f"{plural(record.modules, 'module')}, {size(record.memory_bytes)}"
            return (
                f"{record.node} has a warm process of {record.role} after {seconds(record.took_s)} ({has}){skipped}"
            )
        case records.PrewarmFailed():
            return f"workers of {record.role} start cold on {record.node}: {record.why}"
        case records.RestartedInProcess(restart=restart):
            phases = sorted(restart.phases.items(), key=lambda phase: phase[1], reverse=True)[:MOST_PHASES]
            slowest = f" ({phases_in_words(dict(phases))})" if phases else ""
            took = f"{seconds(restart.total_s)}{slowest}"
            often = f" {record.times} times, the last time" if record.times > 1 else ""
            out = f" without {ranks_of(restart.missing)}" if restart.missing else ""
            world = f"world size {restart.world_size}{out}"
            return (
                f"{_cycle(record)} restarted in process{often} in {took}, as iteration {restart.iteration}"
                f" with {world}: {restart.cause}"
            )
        case records.WorkerFailed():
            return f"{worker_end(record)}, {_cycle(record)}{at_step(record.step)}"
        case records.WorkerHung():
            stacks = f"; stacks: {record.stacks}" if record.stacks else ""
            return f"{worker_hang(record)}, {_cycle(record)}{stacks}"
        case records.WorkersDone():
            return f"{record.node}'s workers of {_cycle(record)} are done{at_step(record.step)}"
        case records.Learned():
            longest = (
                f"{name} {seconds(took)} (longest of {count})" for name, (count, took) in sorted(record.seen.items())
            )
            return f"{record.node} learned how long {record.role} takes: {', '.join(longest) or 'nothing yet'}"
        case records.StacksDumped():
            written = f"the stacks of {ranks_of(record.files)}" if record.files else "no stacks"
            is_named = record.request is None or record.request in record.why
            request = "" if is_named else f" (request {record.request})"
            by_place: dict[str, list[int]] = {}  # ranks in the same line are one item
            for rank, place in sorted(record.where.items()):
                by_place.setdefault(place, []).append(rank)
            places = [
                f"{ranks_of(ranks)} {'is' if len(ranks) == 1 else 'are'} in {place}"
                for place, ranks in by_place.items()
            ]
            return "; ".join([f"{record.node} wrote {written}: {record.why}{request}", *places, *record.problems])
        case _:
            assert_never(record)


def _describe_decision(record: AnyDecision) -> str:
    match record:
        case records.RendezvousOpened():
            stacks = f"; its nodes write their stacks first: {record.dump}" if record.dump else ""
            return f"the rendezvous of {_cycle(record)} opened{stacks}"
        case records.RendezvousClosed():
            promoted = f", of which {names(record.promoted)} promoted" if record.promoted and record.cycle else ""
            world = f"world size {record.world_size} on {names(record.nodes)}{promoted}"
            counts = f"{record.active} active, {record.standby} standby"
            return f"the rendezvous of {_cycle(record)} closed with {world}; {counts}"
        case records.AttributionAsked():
            waits = "; the rendezvous waits for the answer" if record.holds else ""
            return f"the controller asked {names(record.sources)} about {_failed(record)} on {record.node}{waits}"
        case records.AttributionJudged():
            waited = f" after a wait of {seconds(record.waited_s)}" if record.waited_s else ""
            blamed = f"; {gets_ranks_last(record.blamed)}" if record.blamed else ""
            if record.verdict is Verdict.TIMEOUT:
                return f"there is no verdict on {_failed(record)}{waited}: {record.why}{blamed}"
            return f"the verdict on {_failed(record)} is {record.verdict}{waited}: {record.why}{blamed}"
        case records.RestartDecided():
            left = plural(record.restarts_left, "restart")
            pause = f"; {pause_of(record)}" if record.delay_s else ""
            action = action_of(record)
            cycle = f"cycle {record.cycle}" if record.replica in action else _cycle(record)
            return f"the controller {action} after {cycle}: {record.cause} ({left} left){pause}"
        case records.Recovered():
            took = f"{seconds(record.total_s)} ({phases_in_words(record.phases)})"
            return f"{_cycle(record)} runs after a recovery of {took}"
        case records.FirstStepReached():
            reached = f"every node of {_cycle(record)} has stepped, from step {record.step} on"
            after = f"{seconds(record.total_s)} after the failure ({phases_in_words(record.phases)})"
            return f"{reached}, {after}; {record.node} was the last"
        case records.ReplicaEnded():
            return f"{record.replica} {'failed' if record.outcome == 'failed' else 'is done'} in cycle {record.cycle}"
        case records.Shutdown():
            saving = "; workers may save what they can first" if record.checkpoint else ""
            stacks = f"; nodes write their stacks first: {record.dump}" if record.dump else ""
            return f"the job ends with exit code {record.exit_code}: {record.reason}{saving}{stacks}"
        case records.JobEnded():
            missing = f"; {names(record.missing)} never answered" if record.missing else ""
            return f"the job ended with exit code {record.exit_code}: {record.reason}{missing}"
        case records.Fence():
            return f"{record.node} (agent {record.incarnation}) must kill its workers and join again"
        case records.Quarantined():
            return f"{record.node} gets no ranks any more: {record.reason}"
        case records.JobSuspended():
            return f"Slurm suspends the job; {plural(len(record.incarnations), 'agent')} may outlive the lease"
        case records.RequestRefused():
            return f"the controller refuses request {record.request}: {record.why}"
        case records.RestartOrdered():
            because = f": {record.why}" if record.why else f"{to_move(record)}, as {record.by} asked"
            return f"{_cycle(record)} ends for a restart{because}; no budget counts it"
        case records.NodeDrained():
            return f"{record.node} is drained, as {record.by} asked: it gets no ranks any more"
        case records.NodeUndrained():
            because = f": {record.why}" if record.why else f", as {record.by} asked"
            return f"{record.node} may get ranks again{because}"
        case records.CommandOrdered():
            command = shlex.join(record.argv)
            return f"{record.node} runs beside rank {record.rank} of {_cycle(record)} for {record.by}: {command}"
        case records.DumpOrdered():
            return f"agents write the stacks of {_dumped(record)} (request {record.request})"
        case _:
            assert_never(record)


def action_of(record: records.RestartDecided) -> str:
    """`restarts main-0`; `stops the job because its budget is spent`."""
    return {
        "restart_replica": f"restarts {record.replica}",
        "restart_job": "restarts all replicas",
        "ignore": f"goes on without {record.replica}",
        "fail_job": "fails the job",
        "stop": f"stops the job{REASONS.get(record.by, '')}",
    }[record.action]


def pause_of(record: records.RestartDecided) -> str:
    """`cycle 7 waits for 4.00 s because 4 cycles in a row failed soon after the start`."""
    row = f"{plural(record.crashes, 'cycle')} in a row failed soon after the start"
    return f"cycle {record.cycle + 1} waits for {seconds(record.delay_s)} because {row}"


def gets_ranks_last(blamed: tuple[str, ...]) -> str:
    """`n2 gets ranks only where no other node is left`."""
    return f"{names(blamed)} {'gets' if len(blamed) == 1 else 'get'} ranks only where no other node is left"


def _cycle(record: Any) -> str:
    return f"{record.replica} cycle {record.cycle}"


def _failed(record: records.Attributed | records.AttributionAsked | records.AttributionJudged) -> str:
    return _cycle(record) if record.rank is None else f"rank {record.rank} of {_cycle(record)}"


def _dumped(record: records.DumpAsked | records.DumpOrdered) -> str:
    whose = ranks_of(record.ranks) if record.ranks else "all ranks"
    return f"{whose} of {record.replica}" if record.replica else whose


NAME_WIDTH = 20
TIME_WIDTH = 12


class Lines:
    """Turns entries into lines. Times count from the first entry given: pass the journal from its start."""

    def __init__(self) -> None:
        self._begin: float | None = None
        self._why_cold: set[tuple[str, str]] = set()

    def pass_over(self, entry: Entry) -> None:
        """An entry that is not shown."""
        if self._begin is None:
            self._begin = entry.t

    def in_words(self, entry: Entry) -> str:
        """`+4.953s      node_lost            n2 was lost: connection to its agent closed, at step 80`."""
        self.pass_over(entry)
        time = f"+{entry.t - (self._begin or 0.0):.3f}s"
        said = one_line(describe(self._without_known_reason(entry.record)))
        return f"{time:<{TIME_WIDTH}} {event_name(entry.record):<{NAME_WIDTH}} {said}"

    def _without_known_reason(self, record: AnyRecord) -> AnyRecord:
        """Why a role's workers start cold is shown once for each reason, and not for each node and cycle."""
        if isinstance(record, records.PrewarmFailed):
            self._why_cold.add((record.role, record.why))
        elif isinstance(record, records.WorkersStarted) and record.cold is not None:
            reason = record.replica.rpartition("-")[0], record.cold
            if reason in self._why_cold:
                return msgspec.structs.replace(record, cold="")
            self._why_cold.add(reason)
        return record
