"""A rule's words in places where they report no failure never give a verdict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx_slurm.attribution.analyze.analysis import analyze_logs, inquiry_for
from nvrx_slurm.attribution.rules.catalogue import Rule, load_catalogue
from nvrx_slurm.journal.verdicts import Attribution, Verdict

CATALOGUE = load_catalogue()
RULES = [rule for rule in CATALOGUE.rules if rule.role != "noise"]
STEPS = "".join(f"step {step} loss 2.{step:03} grad_norm 0.81\n" for step in range(100, 200))
FRAMES = 'Traceback (most recent call last):\n  File "/work/train.py", line 31, in main\n    run()\n'


def dump(sample: str) -> str:
    return f"Config: {{'watch': {{'pattern': {sample.strip()!r}, 'every': 10}}, 'lr': 0.1, 'amp': True}}\n"


PLACES: dict[str, Callable[[str], str]] = {
    "a printed configuration": lambda sample: f"step 1 loss 2.0\n{dump(sample)}writing the report\n",
    "a negation": lambda sample: f"step 1 loss 2.0\nno '{sample.strip()}' found since the last check\n",
    "a help text": lambda sample: f"usage: train.py\n  --catch TEXT  go on after: {sample.strip()}\n  --lr LR  0.1\n",
    "a command that a shell shows": lambda sample: f"step 1 loss 2.0\n+ grep -c '{sample.strip()}' messages\n",
    "a comment": lambda sample: f"# {sample.strip()}\nstep 1 loss 2.0\n",
    "a retry that succeeded": lambda sample: f"step 1 loss 2.0\n{sample}\nattempt 2 succeeded\n{STEPS}",
    "before 100 steps": lambda sample: f"step 1 loss 2.0\n{FRAMES}{sample}\n{STEPS}",
}


def said(folder: Path, text: str) -> Attribution:
    path = folder / "train.log"
    path.write_text(text)
    return analyze_logs(inquiry_for([path]), CATALOGUE).attribution


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("part", range(8))
def test_a_rule_s_words_where_nothing_failed(tmp_path: Path, place: str, part: int) -> None:
    """Each sample of each rule is tried on its own."""
    wrong = [
        (rule.name, sample[:80], answer.verdict, answer.primary and answer.primary.rule)
        for rule in RULES[part::8]
        for sample in rule.sample
        if (answer := said(tmp_path, PLACES[place](sample))).verdict is not Verdict.UNKNOWN or answer.primary
    ]
    assert not wrong


@pytest.mark.parametrize("part", range(4))
def test_the_same_words_where_something_failed(tmp_path: Path, part: int) -> None:
    """The place makes the difference: at the end of a log the same lines are found."""

    def is_found(rule: Rule) -> bool:
        return any(said(tmp_path, f"{FRAMES}{sample}\n").primary is not None for sample in rule.sample)

    found_by_line = [rule for rule in RULES[part::4] if not rule.below]
    assert [rule.name for rule in found_by_line if not is_found(rule)] == []
