"""A job as one HTML file. Facts, goodput, failures, recoveries and verdicts are markup, and readable without a
script; the script draws the timeline and the steps, and searches the journal."""

# ruff: noqa: E501  # a tag is easier to read in one line

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import Entry
from nvrx_slurm.report import page, recovery
from nvrx_slurm.report.failures import FailureTimeline
from nvrx_slurm.report.goodput import PARTS, Goodput
from nvrx_slurm.report.hindsight import WouldBeStop
from nvrx_slurm.report.history import JobTimeline
from nvrx_slurm.report.model import CycleKey, JobView, Recovery
from nvrx_slurm.report.sentences import describe
from nvrx_slurm.report.snapshot import Snapshot
from nvrx_slurm.report.spans import Span
from nvrx_slurm.report.tables import mood, number
from nvrx_slurm.report.web.document import about, bar, document, header, lines, section, table, text
from nvrx_slurm.report.words import event_name, names, percent, plural, ranks_of, seconds, shares
from nvrx_slurm.util.sanitize import one_line

MOST_FAILURES = 200
# Of the timeline; where there are more nodes, those that did the same share a row.
MOST_ROWS = 40

STACK_BYTES = 24 << 10
ALL_STACKS_BYTES = 600 << 10
# Of one failure.
MOST_STACKS = 8

# Kinds of spans → in words, in the order of the legend.
KINDS: dict[str, str] = {
    "stepping": "makes steps",
    "unstepped": "runs, without a step yet",
    "starting": "starts up",
    "ready": "waits for the rendezvous",
    "detecting": "has failed, unnoticed",
    "deciding": "waits for a decision",
    "stopping": "tears down",
    "joining": "joins",
    "standby": "standby",
    "excluded": "drained or quarantined",
    "lost": "lost",
    "suspended": "suspended",
    "ending": "ends",
    "queue": "in Slurm's queue",
}

_KIND_INDEX = {kind: index for index, kind in enumerate(KINDS)}


@dataclass(slots=True)
class JournalLines:
    """The journal as columns: milliseconds since the first entry, the event, the sentence. A subscriber of
    `JobFold`."""

    events: dict[str, int] = field(default_factory=dict)
    at_ms: list[int] = field(default_factory=list)
    event: list[int] = field(default_factory=list)
    sentence: list[str] = field(default_factory=list)
    began: float | None = None
    _event_of: dict[type, int] = field(default_factory=dict)

    def take(self, entry: Entry, view: JobView) -> None:
        record = entry.record
        if self.began is None:
            self.began = entry.t
        if (event := self._event_of.get(type(record))) is None:
            event = self._event_of[type(record)] = self.events.setdefault(event_name(record), len(self.events))
        self.at_ms.append(round((entry.t - self.began) * 1000))
        self.event.append(event)
        self.sentence.append(one_line(describe(record)))


def job_page(
    shot: Snapshot,
    history: JobTimeline,
    journal: JournalLines,
    *,
    configuration: Sequence[tuple[str, str, str]] = (),
    stops: Sequence[WouldBeStop] = (),
) -> bytes:
    """The whole file. `configuration`: key, value, origin. `stops`: what verdicts of dry runs would have saved or
    lost. Stacks are read from the job's folder."""
    view = shot.view
    goodput = history.finish(view, shot.until)
    of_nodes = history.of_nodes()
    body = "\n".join(
        [
            _header(shot, history, goodput),
            "<main>",
            *_problems(shot),
            _TIMELINE,
            goodput_section(goodput),
            _STEPS if any(cycle.first_step is not None for cycle in view.cycles.values()) else "",
            _failures(shot, history),
            _recoveries(view),
            _verdicts(history, stops, journal.began or 0.0),
            _nodes(view, history, of_nodes),
            _configuration(configuration),
            _JOURNAL,
            "</main>",
        ]
    )
    title = f"{view.name or shot.folder.job_id}: {shot.state}"
    return document(
        title=title, body=body, data=_data(shot, history, journal, of_nodes), scripts=("charts.js", "job.js")
    )


# ------------------------------------------------------------------------------------------ the header


def _header(shot: Snapshot, history: JobTimeline, goodput: Goodput) -> str:
    view = shot.view
    began = shot.started_at
    facts = [
        ("job", shot.folder.job_id),
        ("cluster", shot.info.cluster if shot.info else None),
        ("generation", str(view.generation) if view.generation else None),
        ("started", f"{utc(began)} UTC" if began is not None else None),
        ("took" if shot.exit_code is not None else "for", seconds(shot.elapsed_s)),
        ("exit code", None if shot.exit_code is None else str(shot.exit_code)),
    ]
    reached = [each.to_first_step_s for each in view.recoveries.values() if each.to_first_step_s is not None]
    runs = [each.total_s for each in view.recoveries.values()]
    recovered = sorted(reached or runs)
    lost_us = goodput.total_us - sum(goodput.parts_us[part] for part in ("new_steps", "unreported"))
    shown = [
        ("goodput", percent(goodput.ratio), goodput.of_what),
        ("step", number(view.step), f"{plural(goodput.steps_repeated, 'step')} made twice"),
        ("failures", str(len(history.failures)), f"{plural(view.restarts, 'restart')}"),
        (
            "recovery",
            seconds(recovered[len(recovered) // 2]) if recovered else "–",
            f"median, {'to the first step' if reached else 'until workers ran'}" if recovered else "none was needed",
        ),
        ("not for new steps", hours(lost_us), f"of {hours(goodput.total_us)} of nodes"),
    ]
    # Without steps nothing is known to be lost.
    if goodput.ratio is None:
        shown[-1] = ("neither run nor steps", *shown[-1][1:])
    sections = ("timeline", "goodput", "failures", "recoveries", "verdicts", "nodes", "configuration", "journal")
    pill = f'<span class="pill {mood(shot.state)}">{text(shot.state)}</span>'
    heading = f"<h1>{text(view.name or shot.folder.job_id)} {pill}</h1>"
    if shot.reason and shot.reason != "done":
        heading += f'\n<p class="reason">{text(shot.reason)}</p>'
    known = [(label, fact) for label, fact in facts if fact]
    return header(heading, known, shown, {name: name.capitalize() for name in sections})


def _problems(shot: Snapshot) -> list[str]:
    """What the reader must know of the page itself."""
    found = []
    if not shot.view.n:
        found.append("The journal has no entry yet: there is nothing to show but the configuration.")
    elif shot.is_over and shot.ended_at is None:
        found.append("The job left no result: the page ends with the last entry that its journal has.")
    elif shot.is_over and shot.view.ended_at is None:
        last = f"its last entry, at {utc(shot.view.t)} UTC,"
        found.append(
            f"The journal has no end of the job: from {last} to the end the page shows what was going on then."
        )
    elif shot.exit_code is None:
        found.append(f"The job goes on: the page shows how it stood at {utc(shot.now)} UTC.")
    if shot.store_error:
        found.append(f"{shot.store_error}; the page shows what the folder has.")
    return [f'<p class="note">{text(each)}</p>' for each in found]


# ---------------------------------------------------------------------------------------- the sections

_TIMELINE = """<section id="timeline" aria-labelledby="timeline-title">
<h2 id="timeline-title">Timeline</h2>
<noscript><p class="note">The timeline, the steps and the journal are drawn by a script of this page.</p></noscript>
<div class="tools" hidden>
<button type="button" data-zoom="in" aria-label="Zoom in">+</button>
<button type="button" data-zoom="out" aria-label="Zoom out">−</button>
<button type="button" data-zoom="all">All</button>
<button type="button" data-rows="all" aria-pressed="false" hidden>Each node</button>
<span class="window" aria-live="polite"></span>
</div>
<div class="chart" hidden>
<div class="lanes" aria-hidden="true"></div>
<div class="marks" role="group" aria-label="Failures"></div>
<div class="rows" tabindex="0" role="img"><div class="spacer"><canvas></canvas></div></div>
</div>
<ul class="legend" aria-label="Legend"></ul>
</section>"""

_STEPS = """<section id="steps" aria-labelledby="steps-title">
<h2 id="steps-title">Steps</h2>
<p class="about">From the journal: the first and the last step of each cycle, and between them a straight line. Red:
steps that were lost, and made again.</p>
<div class="steps" role="img" aria-label="Steps over time"></div>
</section>"""

_JOURNAL = """<section id="journal" aria-labelledby="journal-title">
<h2 id="journal-title">Journal</h2>
<form class="search" role="search" hidden>
<input type="search" name="words" placeholder="Search  ( / )" aria-label="Search the journal" autocomplete="off"
spellcheck="false"> <select name="event" aria-label="Event"><option value="">all events</option></select>
<span class="found" role="status"></span>
</form>
<div class="lines" tabindex="0" role="region" aria-label="Journal entries"><div class="spacer"></div></div>
<pre class="line" hidden></pre>
</section>"""


def goodput_section(goodput: Goodput) -> str:
    parts = {part: took_us for part in PARTS if (took_us := goodput.parts_us[part])}
    percents = [f"{share / 10:.1f} %" for share in shares([*parts.values()])]
    factor = goodput.ranks_per_node
    rows = []
    for (part, took_us), share in zip(parts.items(), percents, strict=True):
        swatch = f'<i class="swatch {part}"></i>{text(PARTS[part].words)}'
        of_ranks = [hours(took_us * factor)] if factor else []
        what = f'<span class="soft">{text(PARTS[part].meaning)}</span>'
        rows.append([swatch, share, hours(took_us), *of_ranks, what])
    total = ["<b>all</b>", "100.0 %" if rows else "–", f"<b>{hours(goodput.total_us)}</b>"]
    total += [f"<b>{hours(goodput.total_us * factor)}</b>"] if factor else []
    rows.append(
        [*total, f'<span class="soft">{plural(len(parts), "part")} that add up to it, to the microsecond</span>']
    )
    head = ["part", "share", "of nodes", *(["of ranks"] if factor else []), "what it is"]
    note = f" With one GPU a rank, the time of ranks is GPU time: {factor} a node." if factor else ""
    whole = f"Every node of the job at every moment, from the first start to the end, is in one part.{note}"
    said = ", ".join(f"{PARTS[part].words} {share}" for part, share in zip(parts, percents, strict=True))
    drawn = bar([(part, goodput.share(part), PARTS[part].words) for part in parts], 28)
    inside = (
        f'{about(whole)}<svg class="bar" viewBox="0 0 1000 28" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(said)}">{drawn}</svg>\n'
        f"{table(head, rows, numbers=range(1, len(head) - 1), caption='Where the time went')}"
    )
    return section("goodput", "Where the time went", inside)


def _failures(shot: Snapshot, history: JobTimeline) -> str:
    shown = list(enumerate(history.failures))[-MOST_FAILURES:]
    left_out = len(history.failures) - len(shown)
    began = shot.view.started_at or 0.0
    budget = [ALL_STACKS_BYTES]  # what all failures together have left for stacks
    items = "\n".join(_failure(shot, failure, index, began, budget) for index, failure in shown)
    note = about(f"{plural(left_out, 'earlier failure')} left out." if left_out else "")
    return section("failures", "Failures", f"{note}{items or about('Nothing failed.')}")


def _failure(shot: Snapshot, failure: FailureTimeline, index: int, began: float, budget: list[int]) -> str:
    cause, view = failure.cause, shot.view
    where = "a node without ranks" if failure.key is None else f"{failure.key[0]} cycle {failure.key[2]}"
    after = failure.recovery(view)
    rows: list[tuple[str, str]] = []
    if failure.first_line:
        rows.append(("first line", f"<code>{text(failure.first_line)}</code>"))
    for answer in (each.attribution for each in failure.answers):
        said = answer.explanation or answer.problem or ""
        fault = "" if answer.fault == "unknown" else f" <b>{text(answer.fault)}</b>"
        hint = f' <span class="soft">{text(answer.hint)}</span>' if answer.hint else ""
        rows.append(
            (f"{answer.source}", f"{text(answer.verdict)}{fault}, {answer.confidence:.0%} sure. {text(said)}{hint}")
        )
    if failure.judged is not None:
        acted = "acted on" if failure.judged.acted else f"not acted on: {failure.judged.why}"
        rows.append(("verdict", f"{text(failure.judged.verdict)}, {text(acted)}"))
    if failure.decided is not None:
        rows.append(("decision", text(describe(failure.decided))))
    if failure.more:
        others = "".join(f"<li>{text(each)}</li>" for each in failure.followed)
        rest = failure.more - len(failure.followed)
        others += f"<li>and {plural(rest, 'more report')}</li>" if rest else ""
        rows.append(("then", f"<ul>{others}</ul>"))
    if after is not None:
        rows.append(("recovery", f"{text(recovery.describe(after))}{text(_steps_of(after))}"))
    facts = "".join(f"<div><dt>{text(label)}</dt><dd>{value}</dd></div>" for label, value in rows)
    return (
        f'<details class="failure" id="failure-{index}">\n<summary><span class="when">+{text(seconds(max(0.0, failure.at - began)))}</span>'
        f'<span class="why">{text(cause.why)}</span><span class="soft">{text(where)}</span></summary>\n'
        f"<dl>{facts}</dl>{''.join(_stacks(shot.folder, failure, budget))}</details>"
    )


def _steps_of(each: Recovery) -> str:
    said = recovery.steps(each)
    return f"; {said}" if said else ""


def _stacks(folder: JobFolder, failure: FailureTimeline, budget: list[int]) -> Iterator[str]:
    """The beginning of each file of stacks, as far as the budget of the page reaches."""
    for rank, path in sorted(failure.stacks.items())[:MOST_STACKS]:
        found = ""
        with contextlib.suppress(OSError):
            # A page is handed on: a link in place of the file would put another file of this user into it.
            descriptor = os.open(folder.path / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                found = file.read(min(STACK_BYTES, budget[0])).decode(errors="backslashreplace")
        if found:
            budget[0] -= len(found)
            yield f"<h3>Stacks of {ranks_of([rank])}: {text(path)}</h3><pre>{lines(found)}</pre>"


def _recoveries(view: JobView) -> str:
    bars = "".join(_recovery_bar(each) for each in list(view.recoveries.values())[-MOST_FAILURES:])
    drawn = page.recoveries(view)
    right = [index for index, name in enumerate(drawn.columns) if name in drawn.right]
    rows = [[text(cell) for cell in row.cells] for row in drawn.rows[-MOST_FAILURES:]]
    head = [column.lower() for column in drawn.columns]
    nothing = "There was nothing to recover from."
    phases = table(head, rows, numbers=right, caption="Recoveries by phase", nothing=nothing)
    return section("recoveries", "Recoveries", bars + phases)


def _recovery_bar(each: Recovery) -> str:
    """One recovery, opened into its phases up to the first step, to its own scale."""
    parts = recovery.in_order(each)
    whole = sum(took for _, _, took in parts) or 1.0
    drawn = bar([(f"phase-{name}", took / whole, f"{label} {seconds(took)}") for name, label, took in parts], 14)
    legend = "".join(
        f'<li><i class="swatch phase-{text(name)}"></i>{text(label)} <b>{text(seconds(took))}</b></li>'
        for name, label, took in parts
    )
    until = "to the first step" if each.to_first_step_s is not None else "until all workers ran"
    promoted = f"; {names(each.promoted)} took over" if each.promoted else ""
    return (
        f'<div class="recovery"><p><b>{text(seconds(each.took_s))}</b> {until} '
        f'<span class="soft">{text(each.replica)} cycle {each.cycle}: {text(each.why)}{text(promoted)}{text(_steps_of(each))}</span></p>'
        f'<svg viewBox="0 0 1000 14" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>'
        f'<ul class="legend">{legend}</ul></div>'
    )


def _verdicts(history: JobTimeline, stops: Sequence[WouldBeStop], began: float) -> str:
    worth = {(stop.replica, stop.generation, stop.cycle): stop for stop in stops}
    rows = []
    for failure in history.failures:
        judged = failure.judged
        if judged is None or failure.key is None:
            continue
        stop = worth.get(failure.key)
        held = sum(each.attribution.latency_s for each in failure.answers)
        what = {"right": "right: the restart got nowhere", "wrong": "wrong: the restart made new steps"}
        came = "–" if stop is None else what.get(stop.outcome, "not known")
        cost = "–" if stop is None or not stop.rank_s else f"{stop.rank_s / 3600:.2f} rank-hours"
        rows.append(
            [
                f"+{text(seconds(max(0.0, failure.at - began)))}",
                text(f"{failure.key[0]} cycle {failure.key[2]}"),
                text(judged.verdict),
                "yes" if judged.acted else text(f"no: {judged.why}"),
                text(", ".join(dict.fromkeys(each.attribution.fault for each in failure.answers)) or "–"),
                text(seconds(judged.waited_s) if judged.waited_s else "nothing"),
                text(seconds(held)),
                text(came),
                text(cost),
            ]
        )
    head = [
        "at",
        "failure",
        "verdict",
        "acted on",
        "fault",
        "waited",
        "sources took",
        "looking back",
        "saved or lost",
    ]
    nothing = "No source of attribution was asked."
    inside = table(head, rows, numbers={5, 6, 8}, caption="Verdicts", nothing=nothing)
    return section("verdicts", "Verdicts, and what they cost or saved", inside)


def _nodes(view: JobView, history: JobTimeline, of_nodes: dict[str, list[Span]]) -> str:
    """Each node's time by kind, and how often it failed."""
    took: dict[str, Counter[str]] = {}
    for node, spans in of_nodes.items():
        mine = took[node] = Counter()
        for span in spans:
            mine[span.kind] += span.until_us - span.since_us
    used = set[str]().union(*took.values())
    failed = Counter(failure.cause.node for failure in history.failures)
    kinds = [kind for kind in KINDS if kind in used]
    rows = [
        [
            text(node),
            text(view.nodes[node].state) if node in view.nodes else "–",
            str(failed[node]),
            *(text(seconds(mine[kind] / 1e6)) if kind in mine else "–" for kind in kinds),
        ]
        for node, mine in took.items()
    ]
    head = ["node", "last state", "failures", *(KINDS[kind] for kind in kinds)]
    every = table(head, rows, numbers=range(2, len(head)), caption="Nodes")
    summary = f"<summary>{plural(len(took), 'node')}, each by what it did</summary>"
    return section("nodes", "Nodes", f"<details>{summary}{every}</details>")


def _configuration(configuration: Sequence[tuple[str, str, str]]) -> str:
    rows = [[text(key), f"<code>{text(value)}</code>", text(origin)] for key, value, origin in configuration]
    inside = about("The folder of the job has no plan.")
    if rows:
        summary = f"<summary>{plural(len(rows), 'key')}, each with where its value came from</summary>"
        every = table(["key", "value", "origin"], rows, caption="Configuration")
        inside = f"<details>{summary}{every}</details>"
    return section("configuration", "Configuration", inside)


# --------------------------------------------------------------------------------------------- the data


def _data(
    shot: Snapshot, history: JobTimeline, journal: JournalLines, of_nodes: dict[str, list[Span]]
) -> dict[str, object]:
    """What the script draws. Times are milliseconds since the first entry."""
    view, began = shot.view, journal.began or 0.0
    began_us = round(began * 1e6)
    cycle_index: dict[CycleKey | None, int] = {key: index for index, key in enumerate(view.cycles)}
    last = max((spans[-1].until_us for spans in of_nodes.values() if spans), default=began_us)
    rows: dict[str, list[int]] = {}
    for node, spans in of_nodes.items():
        row = rows[node] = []
        until_us, until = None, 0
        for span in spans:
            # Most begin where the one before has ended.
            since = until if span.since_us == until_us else (span.since_us - began_us) // 1000
            until_us, until = span.until_us, (span.until_us - began_us) // 1000
            row += (_KIND_INDEX[span.kind], since, until, cycle_index.get(span.cycle, -1))
    cycles = []
    for cycle in view.cycles.values():
        of_generation = f" of generation {cycle.generation}" if view.generation else ""
        moments = (cycle.opened_at, cycle.closed_at, cycle.first_step_at, cycle.ended_at)
        cycles.append(
            [
                f"{cycle.replica} cycle {cycle.cycle}{of_generation}",
                one_line(cycle.replica),
                *(None if at is None else round((at - began) * 1000) for at in moments),
                cycle.first_step,
                view.last_step(cycle),
                one_line(cycle.outcome or ""),
            ]
        )
    return {
        "began": began,
        "until": (last - began_us) // 1000,
        "kinds": [[kind, words] for kind, words in KINDS.items()],
        "nodes": [one_line(node) for node in rows],
        "spans": list(rows.values()),
        "groups": _groups(rows),
        "cycles": cycles,
        "failures": [
            [round((failure.at - began) * 1000), one_line(failure.cause.why), failure.cause.kind]
            for failure in history.failures
        ],
        "firstFailure": max(0, len(history.failures) - MOST_FAILURES),
        "events": list(journal.events),
        # Each less the one before: that compresses to a third.
        "at": [at - before for at, before in zip(journal.at_ms, [0, *journal.at_ms], strict=False)],
        "event": journal.event,
        "sentence": journal.sentence,
    }


def _groups(rows: dict[str, list[int]]) -> list[list[object]]:
    """Label and indices of the nodes that share a row: those that did the same in the same cycles, if there are many
    nodes."""
    if len(rows) <= MOST_ROWS:
        return [[one_line(node), [index]] for index, node in enumerate(rows)]
    alike: dict[bytes, list[int]] = {}
    nodes = list(rows)
    for index, row in enumerate(rows.values()):
        # Kinds and cycles without their times, which differ by milliseconds between nodes that did the same.
        did = msgspec.msgpack.encode([row[0::4], row[3::4]])
        alike.setdefault(did, []).append(index)
    return [[one_line(names(nodes[index] for index in found)), found] for found in alike.values()]


def hours(microseconds: int) -> str:
    """`412.3 h`; `12.5 min`, `4.21 s` where that is short."""
    spent = microseconds / 1e6
    if spent >= 3600 * 9.95:
        return f"{spent / 3600:,.1f} h"
    return f"{spent / 3600:.2f} h" if spent >= 3600 else seconds(spent)


def utc(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"
