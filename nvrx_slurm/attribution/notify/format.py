"""A decided failure as a Slack message, and as a document for an index. Pure."""

from __future__ import annotations

import html
import re
import shlex
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

import msgspec

from nvrx_slurm.attribution.notify.base import DecidedFailure
from nvrx_slurm.journal.verdicts import Attribution, Verdict
from nvrx_slurm.util.sanitize import one_line, uncoloured

# Slack's own bounds (Block Kit reference: header, section).
HEADER_CHARS, FIELD_CHARS, SECTION_CHARS = 150, 2000, 3000

# Narrower ones: beyond some 10,000 characters in all Slack answers `msg_blocks_too_long`.
EXPLANATION_CHARS, EVIDENCE_CHARS, LINE_CHARS = 600, 1000, 240

MOST_SOURCES, MOST_LINES = 4, 5
SCHEMA = 1

ACTIONS = {
    "restart_replica": "the replica starts again",
    "restart_job": "all replicas start again",
    "ignore": "the replica ends, the job goes on",
    "fail_job": "the job ends",
    "stop": "the job ends, and is not started again (93)",
}
_SIGNS = {Verdict.STOP: "🛑", Verdict.RESTART: "🔄", Verdict.UNKNOWN: "❔", Verdict.TIMEOUT: "⏳"}


def slack_message(decided: DecidedFailure, *, channel: str, mention: str | None, name: str) -> dict[str, Any]:
    """The arguments of `chat.postMessage`, all within Slack's bounds. `name`: the job's, for people."""
    headline = one_line(f"{_SIGNS[decided.verdict]} {decided.verdict}: {name or 'job'} ({decided.job_id})")
    first, done = what_failed(decided), what_is_done(decided)
    greeting = f"{mention_of(mention)} " if mention else ""
    leading, key = decided.leading, decided.key
    fields = [f"{bold('Cycle')}\n{escaped(key.replica)}, cycle {key.cycle}, generation {key.generation}"]
    if leading is not None:
        sure = f", {leading.confidence:.0%} sure" if leading.confidence else ""
        fields.append(f"{bold('Fault')}\n{fitting(leading.fault, 200)} ({leading.scope}{sure})")
    if nodes := blamed_nodes(decided):
        fields.append(f"{bold('Blamed')}\n{fitting(', '.join(nodes), 1000)}")
    if leading is not None and leading.missing:
        fields.append(f"{bold('Missing')}\n{fitting('ranks ' + ', '.join(map(str, leading.missing)), 1000)}")
    folder = str(PurePath(key.job).parent)
    command = shlex.join(["nvrx-slurm", "explain", decided.job_id, "--cycle", str(key.cycle), "--folder", folder])
    more = f"More: `{fitting(command.replace('`', 'ˋ'), 1500)}`"
    lead = f"{greeting}{bold('Failed first')} {fitting(first, 900)}\n{bold('Done')} {fitting(done, 900)}"
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": headline[:HEADER_CHARS], "emoji": True}},
        _section(lead),
        {"type": "section", "fields": [_mrkdwn(text[:FIELD_CHARS]) for text in fields]},
        *(_section(_source(each)) for each in decided.attributions[:MOST_SOURCES]),
        {"type": "context", "elements": [_mrkdwn(more)]},
    ]
    text = fitting(f"{headline}. {first}; {done}", SECTION_CHARS)
    return {
        "channel": channel,
        "text": greeting + text,
        "blocks": blocks,
        "unfurl_links": False,
        "unfurl_media": False,
    }


def document(decided: DecidedFailure, *, name: str, cluster: str | None, now: float) -> dict[str, Any]:
    """What the index gets. All fields are always there, so that each keeps its type; times are UTC."""
    leading, judged = decided.leading, decided.judged
    failed_at = decided.inquiry.failed.t if decided.inquiry.failed else 0.0
    time = datetime.fromtimestamp(failed_at or now, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {
        "@timestamp": time,
        "schema": SCHEMA,
        "id": decided.identity,
        "job": {"id": decided.job_id, "name": name, "folder": decided.key.job, "cluster": cluster},
        "generation": decided.key.generation,
        "replica": decided.key.replica,
        "cycle": decided.key.cycle,
        "rank": decided.key.rank,
        "failed": msgspec.to_builtins(decided.inquiry.failed),
        "nodes": list(decided.inquiry.nodes),
        "verdict": decided.verdict,
        "fault": leading.fault if leading else "unknown",
        "scope": leading.scope if leading else "unknown",
        "confidence": leading.confidence if leading else 0.0,
        "blamed": {"nodes": list(blamed_nodes(decided)), "ranks": list(leading.ranks) if leading else []},
        "decision": msgspec.to_builtins(judged),
        "attributions": msgspec.to_builtins(list(decided.attributions)),
    }


def what_failed(decided: DecidedFailure) -> str:
    """One line: who, where, how. Causes name rank and node themselves."""
    failed, rank = decided.inquiry.failed, decided.key.rank
    if failed is None:
        return "a node" if rank is None else f"rank {rank}"
    error = failed.error if failed.error and failed.error not in failed.cause else ""
    return ", ".join(filter(None, (failed.cause, error, f"at step {failed.step}" if failed.step is not None else "")))


def what_is_done(decided: DecidedFailure) -> str:
    """One line: the action, and of a STOP whether it was the reason."""
    judged = decided.judged
    if judged is None:
        return "nothing yet: no decision"
    done = ACTIONS.get(judged.action, judged.action or "nothing")
    if judged.verdict is not Verdict.STOP:
        return done
    return f"{done}; the verdict decided" if judged.acted else f"{done}; not acted on: {judged.why or 'dry run'}"


def blamed_nodes(decided: DecidedFailure) -> tuple[str, ...]:
    """The nodes that the decision blames; without one, those of the leading answer."""
    if decided.judged is not None:
        return decided.judged.nodes_blamed
    return decided.leading.nodes if decided.leading else ()


def _source(answer: Attribution) -> str:
    """One source's answer: its verdict, explanation, evidence and hint."""
    head = f"{bold(escaped(answer.source[:100]))} {answer.verdict} after {answer.latency_s:.1f} s"
    text = answer.problem or answer.explanation
    parts = [head + (f": {fitting(text, EXPLANATION_CHARS)}" if text else "")]
    evidence = [each for each in (answer.primary, *answer.secondary) if each is not None]
    lines = []
    for each in evidence[:MOST_LINES]:
        where = PurePath(each.file).name + (f":{each.line}" if each.line else "")
        lines.append(f"{where}: {shortened(each.text, LINE_CHARS)}")
    if len(evidence) > MOST_LINES:
        lines.append(f"… {len(evidence) - MOST_LINES} more")
    if lines:
        parts.append(code_block("\n".join(lines), EVIDENCE_CHARS))
    if answer.hint:
        parts.append(fitting(answer.hint, EXPLANATION_CHARS))
    return "\n".join(parts)


def shortened(text: str, most: int) -> str:
    """On one line, and at most `most` characters of it."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": _mrkdwn(text)}


def _mrkdwn(text: str) -> dict[str, Any]:
    return {"type": "mrkdwn", "text": text}


# ---- text as Slack's `mrkdwn` shows it, with any content

_TORN_ENTITY = re.compile(r"&[a-z]*\Z")
_MEMBER = re.compile(r"[UW][A-Z0-9]+")
_GROUP = re.compile(r"S[A-Z0-9]+")


def escaped(text: str) -> str:
    """Nothing of it is a link, a mention, or an entity; control characters are visible, colours left out."""
    return html.escape(uncoloured(text).replace("\t", " "), quote=False)


def fitting(text: str, most: int) -> str:
    """Escaped, and at most `most` characters of it: cut between characters, never inside an entity."""
    whole = escaped(text)
    return whole if len(whole) <= most else _TORN_ENTITY.sub("", whole[: most - 1]) + "…"


def code_block(text: str, most: int) -> str:
    """As a block that ends where it should: backticks inside become look-alikes. At most `most` characters."""
    return f"```\n{fitting(text.replace('`', 'ˋ'), most - 8)}\n```"


def bold(text: str) -> str:
    return f"*{text}*"


def mention_of(whom: str) -> str:
    """`U024BE7LH` → `<@U024BE7LH>`, `@here` → `<!here>`, a group's id likewise; anything else is shown as it is."""
    bare = whom.strip().lstrip("@")
    if bare in ("here", "channel", "everyone"):
        return f"<!{bare}>"
    if _MEMBER.fullmatch(bare):
        return f"<@{bare}>"
    return f"<!subteam^{bare}>" if _GROUP.fullmatch(bare) else escaped(whom)
