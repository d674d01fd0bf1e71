"""Many jobs as one HTML file: how often what fails, how long repairs take, which nodes stand out, what it all cost.
It needs no script."""
# ruff: noqa: E501  # a tag is easier to read in one line

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil

from nvrx_slurm.report.fleet import Fleet, Repair
from nvrx_slurm.report.recovery import PHASES, STARTUP
from nvrx_slurm.report.web.document import about, document, header, section, table, text
from nvrx_slurm.report.web.job_page import goodput_section, hours, utc
from nvrx_slurm.report.words import percent, plural, seconds

MOST_NODES = 50
MOST_JOBS = 500
KINDS: dict[str, str] = {
    "worker_exit": "a worker exited",
    "worker_signal": "a worker was killed by a signal",
    "worker_error": "a worker raised, or could not start",
    "worker_hung": "a worker hung",
    "node_lost": "a node was lost",
    "node_silent": "a node fell silent",
    "node_isolated": "a node was cut off",
    "node_left": "a node left",
    "unknown": "not known",
}


def fleet_page(fleet: Fleet, *, since: float, now: float) -> bytes:
    """The whole file."""
    body = "\n".join(
        [
            _header(fleet, since, now),
            "<main>",
            goodput_section(fleet.goodput),
            _causes(fleet),
            _hours(fleet),
            _phases(fleet),
            _nodes(fleet),
            _verdicts(fleet),
            _jobs(fleet),
            "</main>",
        ]
    )
    return document(title=f"{plural(len(fleet.jobs), 'job')}: nvrx-slurm report", body=body, data=None, scripts=())


def _header(fleet: Fleet, since: float, now: float) -> str:
    goodput, every = fleet.goodput, fleet.everything
    lost = goodput.total_us - sum(goodput.parts_us[part] for part in ("new_steps", "unreported"))
    mtbf = hours(round(every.between_node_s * 1e6)) if every.count else "–"
    shown = [
        ("goodput", percent(goodput.ratio), goodput.of_what),
        ("failures", str(every.count), f"in {plural(len(fleet.jobs), 'job')}"),
        ("MTBF", mtbf, "of one node at work, between failures"),
        ("MTTR", "–" if every.mean_s is None else seconds(every.mean_s), "mean, until steps are made again"),
        ("not for new steps", hours(lost), f"of {hours(goodput.total_us)} of nodes"),
    ]
    names = ("goodput", "causes", "hours", "phases", "nodes", "verdicts", "jobs")
    sections = {name: name.capitalize() for name in names} | {"phases": "Recoveries"}
    facts = [("active since", f"{utc(since)} UTC"), ("as of", f"{utc(now)} UTC")]
    return header(f"<h1>{plural(len(fleet.jobs), 'job')}</h1>", facts, shown, sections)


_NOTHING = "Nothing failed."


def _repair(repair: Repair) -> list[str]:
    return [
        str(repair.count),
        hours(round(repair.between_node_s * 1e6)) if repair.between_node_s else "–",
        "–" if repair.median_s is None else seconds(repair.median_s),
        "–" if repair.mean_s is None else seconds(repair.mean_s),
    ]


def _causes(fleet: Fleet) -> str:
    rows = [[text(KINDS.get(kind, kind)), *_repair(repair)] for kind, repair in fleet.by_kind.items()]
    head = ["cause", "failures", "MTBF", "repaired, median", "MTTR (mean)"]
    inside = table(head, rows, numbers=range(1, 5), caption="Causes", nothing=_NOTHING)
    what = "MTBF: time of a node at work, of all jobs, for each failure of this cause. MTTR: from the failure to the first step of all nodes."
    return section("causes", "What fails, and how long repairs take", about(what) + inside)


def _hours(fleet: Fleet) -> str:
    most = max([1, *fleet.by_hour])
    bars = "".join(
        f'<rect x="{hour * 40 + 4}" y="{120 - 108 * count / most:.1f}" width="32" height="{108 * count / most:.1f}">'
        f"<title>{hour:02}:00 UTC: {plural(count, 'failure')}</title></rect>"
        for hour, count in enumerate(fleet.by_hour)
    )
    labels = "".join(f'<text x="{hour * 40 + 4}" y="138">{hour:02}</text>' for hour in range(0, 24, 3))
    said = ", ".join(f"{hour:02} h {count}" for hour, count in enumerate(fleet.by_hour) if count) or "none"
    inside = f'<div class="columns"><svg viewBox="0 0 960 144" preserveAspectRatio="none" role="img" aria-label="Failures by hour of the day: {text(said)}">{bars}{labels}</svg></div>'
    return section("hours", "Failures by hour of the day (UTC)", inside)


def _phases(fleet: Fleet) -> str:
    rows = [
        [
            f'<i class="swatch phase-{text(phase)}"></i>{text(PHASES.get(phase, "first step" if phase == STARTUP else phase))}',
            str(len(values)),
            *(text(seconds(_quantile(values, percents))) for percents in (50, 90, 99, 100)),
        ]
        for phase, values in fleet.by_phase.items()
    ]
    head = ["phase", "recoveries", "median", "90 %", "99 %", "longest"]
    inside = table(head, rows, numbers=range(1, 6), caption="Recoveries by phase", nothing=_NOTHING)
    return section("phases", "Recoveries by phase", inside)


def _quantile(values: Sequence[float], percents: int) -> float:
    """Of sorted values, the smallest that so large a part of them does not exceed (the nearest rank)."""
    return values[ceil(percents * len(values) / 100) - 1]


def _nodes(fleet: Fleet) -> str:
    nothing = Repair(count=0, between_node_s=0.0, median_s=None, mean_s=None)
    names = dict.fromkeys([*fleet.evidence, *fleet.by_node])
    known = [(node, fleet.evidence.get(node, 0), fleet.by_node.get(node, nothing)) for node in names]
    known.sort(key=lambda each: each[1] + each[2].count, reverse=True)
    rows = [[text(node), str(evidence), *_repair(repair)] for node, evidence, repair in known[:MOST_NODES]]
    head = ["node", "evidence", "failures", "MTBF", "repaired, median", "MTTR (mean)"]
    inside = table(head, rows, numbers=range(1, 6), caption="Nodes", nothing=_NOTHING)
    what = "Evidence: how often the node itself was lost, or a verdict blamed it. A failure counts for the node where it was seen."
    return section("nodes", "Nodes with the most evidence", about(what) + inside)


def _verdicts(fleet: Fleet) -> str:
    found = fleet.verdicts
    counts = Counter(stop.outcome for stop in found.stops)
    rows = [
        ["STOPs that were acted on", str(found.acted)],
        ["STOPs of dry runs that were right: the restart got nowhere", str(counts["right"])],
        ["… wrong: the restart made new steps", str(counts["wrong"])],
        ["… not known", str(counts["open"])],
        ["precision", "not known yet" if found.precision is None else f"{found.precision:.0%}"],
        ["rank-hours that the right ones would have saved", f"{found.rank_hours_saved:.2f}"],
        ["rank-hours that the wrong ones would have lost", f"{found.rank_hours_lost:.2f}"],
    ]
    inside = table(["what", "value"], [[text(a), text(b)] for a, b in rows], numbers={1}, caption="Verdicts")
    return section("verdicts", "What verdicts were worth", inside)


def _jobs(fleet: Fleet) -> str:
    rows = []
    for job in fleet.jobs[:MOST_JOBS]:
        goodput = job.goodput
        rows.append(
            [
                text(job.job),
                text(job.name or "–"),
                utc(job.began),
                text(seconds(max(0.0, job.ended - job.began))),
                "–" if job.exit_code is None else str(job.exit_code),
                hours(goodput.total_us),
                percent(goodput.ratio),
                str(len(job.failures)),
                f"<code>nvrx-slurm report {text(job.job)}</code>",
            ]
        )
    head = ["job", "name", "started (UTC)", "took", "exit code", "of nodes", "goodput", "failures", "its own page"]
    left_out = len(fleet.jobs) - len(rows)
    inside = table(head, rows, numbers=range(3, 8), caption="Jobs", nothing="No job was active.")
    note = about(f"{plural(left_out, 'older job')} left out." if left_out else "")
    return section("jobs", "Jobs", note + inside)
