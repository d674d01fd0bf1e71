"""The logs of a large cycle: what the agents of its nodes have found, and what the broker has to read itself.

Each agent reads the logs of its own ranks at the failure. What has not come after a moment is read here, node by
node, from the shared folder: the logs of a node that is lost, or whose agent is slow. Findings that come meanwhile
are taken instead. At the deadline the failure is judged by what has come until then.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import structs
from msgspec.structs import replace

from nvrx_slurm.attribution.analyze.analysis import AnalysisResult, analyze_logs
from nvrx_slurm.attribution.analyze.attributing import SideEvidence
from nvrx_slurm.attribution.analyze.evidence import read_logs
from nvrx_slurm.attribution.analyze.node_findings import KnownRules, decoded, joined, restored
from nvrx_slurm.attribution.rules.catalogue import Catalogue
from nvrx_slurm.attribution.scan import LogFile, Scan
from nvrx_slurm.errors import MalformedRecord, SourceError, UsageError
from nvrx_slurm.journal.verdicts import MOST_FINDINGS_BYTES, AgentFindings, Inquiry
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.log import get_logger

log = get_logger("attribution")

# So many cycles' findings are kept: those of a failure, and of the ones before it, of each of some replicas.
MOST_CYCLES = 16

MOST_KEPT_BYTES = 256 << 20


class ReceivedFindings:
    """The findings that agents have sent, by cycle and node. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._cycles: OrderedDict[str, dict[str, AgentFindings]] = OrderedDict()
        self._bytes = 0
        self.version = 0  # grows with each that comes

    def put(self, found: AgentFindings) -> None:
        """Keep them. Those of whole logs are not replaced by earlier ones that arrive late or again."""
        if len(found.data) > MOST_FINDINGS_BYTES:
            log.warning("findings of %s are %d bytes: they are not kept", found.node, len(found.data))
            return
        with self._changed:
            of_cycle = self._cycles.setdefault(found.folder, {})
            before = of_cycle.get(found.node)
            if before is not None and before.whole and not found.whole:
                return
            of_cycle[found.node] = found
            self.version += 1
            self._bytes += len(found.data) - (len(before.data) if before is not None else 0)
            # The oldest cycles go first; the newest one stays, however large it is.
            while len(self._cycles) > 1 and (len(self._cycles) > MOST_CYCLES or self._bytes > MOST_KEPT_BYTES):
                _, dropped = self._cycles.popitem(last=False)
                self._bytes -= sum(len(each.data) for each in dropped.values())
            self._changed.notify_all()

    def of(self, folder: str) -> dict[str, AgentFindings]:
        """Node → its findings of that cycle, as far as they have come."""
        with self._changed:
            return dict(self._cycles.get(folder, {}))

    def wait(self, folder: str, nodes: Iterable[str], *, whole: bool, timeout_s: float) -> bool:
        """Block until there are findings of each of the nodes; `whole`: of whole logs. False: time is up."""
        wanted = set(nodes)

        def have_come() -> bool:
            found = self._cycles.get(folder, {})
            return all(node in found and (found[node].whole or not whole) for node in wanted)

        with self._changed:
            return self._changed.wait_for(have_come, max(0.0, timeout_s))


class StopAt(threading.Event):
    """Set when `stop` is, and from a moment of the clock on."""

    def __init__(self, stop: threading.Event, clock: Clock, deadline: float) -> None:
        super().__init__()
        self._stop, self._clock, self._deadline = stop, clock, deadline

    # Only this method: readers look at the event between two pieces of work, and none of them waits for it.
    def is_set(self) -> bool:
        return super().is_set() or self._stop.is_set() or self._clock.monotonic() >= self._deadline


class IncompleteFindings(SourceError):
    """Not all agents have sent what they found, and the broker does not read their logs yet."""


class Gathered(NamedTuple):
    """What is known of a cycle's logs. `agents`: nodes whose agents have read them. `missing`: nodes of which nothing
    is known, for lack of time."""

    scan: Scan
    side: SideEvidence
    agents: int = 0
    missing: tuple[str, ...] = ()


def gather(
    inquiry: Inquiry,
    logs: Sequence[LogFile],
    catalogue: Catalogue,
    received: ReceivedFindings,
    stop: threading.Event,
    *,
    whole: bool,
    reads: bool,
) -> Gathered:
    """Collect the evidence of one cycle, whose logs are `logs`. `whole`: early findings, of logs that were still
    written, count only where there is no time for more. `reads`: read here what no agent has sent; else only what is
    of no node."""
    folder, known = inquiry.paths[0], KnownRules.of(catalogue)
    parts: list[tuple[Scan, SideEvidence]] = []
    problems: list[str] = []
    agents = 0
    of_nodes: dict[str, list[LogFile]] = defaultdict(list)
    own: list[LogFile] = []  # what is read here in any case
    for each in logs:
        # Agents send no dumps of the flight recorder: only all of them together show which rank is missing.
        if each.node in inquiry.nodes and each.node is not None and each.kind != "flight_recorder":
            of_nodes[each.node].append(each)
        else:
            own.append(each)

    def take(found: AgentFindings) -> bool:
        """Whether they can be read. What they do not cover is among `own` then."""
        nonlocal agents
        part, covered = None, set[Path]()
        try:
            part = restored(decoded(found.data), found.node, Path(folder), inquiry, known)
        except MalformedRecord as error:
            log.warning("%s; the logs of its ranks are read instead, if there is time", error)
        else:
            parts.append(part)
            agents += 1
            covered = {each.path for each in part[0].files}
        own.extend(each for each in of_nodes[found.node] if each.path not in covered)
        return part is not None

    waiting = list(of_nodes)
    while waiting:
        # Before each node that is read here: meanwhile the findings of others may have come.
        arrived = received.of(folder)
        for node in list(waiting):
            found = arrived.get(node)
            if found is not None and (found.whole or not whole):
                waiting.remove(node)
                take(found)
        if not waiting or not reads or stop.is_set():
            break
        node = waiting[0]
        part = read_logs(of_nodes[node], catalogue, stop)
        # What a stop has cut short is dropped: early findings of all the node's logs say more.
        if not stop.is_set():
            waiting.remove(node)
            parts.append(part)
    if own:
        parts.append(read_logs(own, catalogue, stop))
    missing = []
    arrived = received.of(folder)
    for node in waiting:  # what was read before the workers had ended is better than nothing
        if node not in arrived or not take(arrived[node]):
            missing.append(node)
            problems.append(f"{node}: there was no time to read the logs of its ranks")
    return Gathered(*joined(parts, problems), agents=agents, missing=tuple(missing))


# Of the decision's time: so long the broker waits for findings of whole logs before it reads any itself. An agent
# needs about a second.
HEAD_START_SHARE = 0.1

# So long it waits for those of logs that are still written; these it never reads itself.
FIRST_WAIT_SHARE = 0.3


def analyze_gathered(
    inquiry: Inquiry,
    catalogue: Catalogue,
    received: ReceivedFindings,
    *,
    logs: Sequence[LogFile],
    whole: bool,
    stop: threading.Event,
    clock: Clock,
    deadline: float,
) -> AnalysisResult:
    """Why a large cycle ended, by what agents have found, and by what is read here until the `deadline`. `whole`: no
    more will be written to the logs. Raises IncompleteFindings where they are not whole, and a node is missing."""
    stop_at, agents = StopAt(stop, clock, deadline), 0

    def read(asked: Inquiry, logs: Sequence[LogFile]) -> tuple[Scan, SideEvidence]:
        nonlocal agents
        is_before = asked is not inquiry
        gathered = gather(asked, logs, catalogue, received, stop_at, whole=whole or is_before, reads=whole)
        if gathered.missing and not whole:
            raise IncompleteFindings(f"the findings of {len(gathered.missing)} nodes have not come yet")
        if gathered.missing and is_before:
            raise UsageError("there is no time to read the logs of the cycle before")
        agents = agents if is_before else gathered.agents
        return gathered.scan, gathered.side

    result = analyze_logs(inquiry, catalogue, logs=logs, stop=stop, read=read)
    found = result.attribution
    assert found.read is not None
    return replace(result, attribution=structs.replace(found, read=structs.replace(found.read, agents=agents)))
