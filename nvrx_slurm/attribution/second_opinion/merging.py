"""What of a model's opinion is believed; pure."""

from __future__ import annotations

import re

from msgspec.structs import replace

from nvrx_slurm.attribution.second_opinion.question import Excerpt, Opinion
from nvrx_slurm.journal.verdicts import Attribution, Evidence, Verdict

LEAST_CONFIDENCE = {Verdict.RESTART: 0.5, Verdict.STOP: 0.8}
MOST_CONFIDENCE = 0.75
"""A model's own confidence is taken for no more than this."""

_GIVES_ORDERS = re.compile(
    r"""(?ix) \b(?:ignore|disregard|forget)\b.{0,40}\b(?:instructions?|prompts?|above|previous|rules)\b
      | \byou\ are\ (?:now\ )?an?\ (?:\w+\ )?(?:ai|assistant|model|system)\b
      | \b(?:answer|respond|reply|output|say)\b.{0,40}\b(?:STOP|RESTART|UNKNOWN)\b
      | </?\s*(?:excerpt|system|instructions?)\s*> | \b(?:system|assistant)\s*prompt\b"""
)


def gives_orders(shown: Excerpt) -> bool:
    """Whether a line of the excerpt speaks to the model: then somebody who can print decides, not the evidence."""
    return any(_GIVES_ORDERS.search(line) for _, line in shown.lines)


def merged(rules_say: Attribution, opinion: Opinion, shown: Excerpt, model: str) -> Attribution:
    """The rules' UNKNOWN, filled in where the opinion is sure enough and shows its line; else with why it is not."""
    verdict = Verdict(opinion.verdict)
    if doubt := _doubt(opinion, verdict, shown):
        return replace(rules_say, problem=f"the second opinion of {model} is not used: {doubt}")
    return replace(
        rules_say,
        verdict=verdict,
        confidence=round(min(opinion.confidence, MOST_CONFIDENCE), 2),
        fault=opinion.fault,
        scope=opinion.scope,
        transient=verdict is Verdict.RESTART,
        primary=Evidence(
            file=shown.file_of(opinion.evidence) or "", line=0, text=opinion.evidence.strip(), rule="second opinion"
        ),
        explanation=f"The rules do not know this failure. {model} says: {opinion.explanation.strip()}",
    )


def _doubt(opinion: Opinion, verdict: Verdict, shown: Excerpt) -> str | None:
    if verdict is Verdict.UNKNOWN:
        return "it does not know either"
    if opinion.confidence < LEAST_CONFIDENCE[verdict]:
        return f"it says {verdict} with a confidence of {opinion.confidence:g} only"
    if shown.file_of(opinion.evidence) is None:
        return "the line that it quotes was not in the excerpt"
    return None
