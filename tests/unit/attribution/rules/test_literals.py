"""The literals for which the search looks before it tries a rule's pattern."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvrx_slurm.attribution.rules.catalogue import Regex, Rule, load_catalogue
from nvrx_slurm.attribution.rules.literals import literals_of


@pytest.mark.parametrize(
    ("pattern", "literals"),
    [
        ("out of memory", {"out of memory"}),
        (r"^CUDA error: .{0,40} memory$", {"CUDA error: "}),
        (r"(?:alpha|beta) \d+", {"alpha", "beta"}),
        (r"(?:alpha|beta)? something", {" something"}),
        (r"(?P<rank>\d+) left(?: early)*", {" left"}),
        (r"colou?rful", {"colo"}),
        (r"needles?{2}", {"needle"}),
        (r"a{4}bcde", {"bcde"}),
        (r"x{0}abcd", {"abcd"}),
        (r"(?!never)(?<=behind)ahead", {"ahead"}),
        (r"a\.b\.c\.d", {"a.b.c.d"}),
        (r"\x41bcde", {"bcde"}),
        (r"[abcd]efgh[^]ijkl]mn", {"efgh"}),
        (r"(?i:Other) case", {" case"}),
        (r"(?:one (?:inner|other) two|three four)", {"inner", "other", "three four"}),
        (r"{braces}", {"{braces}"}),
    ],
)
def test_texts_of_a_pattern(pattern: str, literals: set[str]) -> None:
    """Of the sets of texts of which every match contains one, the set whose shortest text is longest."""
    assert set(literals_of(pattern)) == {literal.encode() for literal in literals}


@pytest.mark.parametrize(
    "pattern", [r"\d+", "abc", "long text|.", "(?i)anything", r"(?:maybe)?", r"(a)(?(1)bcde|fghi)"]
)
def test_no_texts(pattern: str) -> None:
    """A pattern has no literals unless every match contains a text of four bytes."""
    assert literals_of(pattern) == ()


def test_case() -> None:
    """Where case does not count, texts are in lower case."""
    assert literals_of("Fabric MANAGER", ignore_case=True) == (b"fabric manager",)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(st.data(), st.sampled_from(load_catalogue().rules))
def test_every_match_holds_a_text(data: st.DataObject, rule: Rule) -> None:
    """Every line that a shipped pattern matches contains one of its literals."""
    assert isinstance(rule.pattern, Regex)
    without_lookarounds = re.compile(rule.pattern.pattern, re.IGNORECASE if rule.ignore_case else 0)
    line = data.draw(st.from_regex(without_lookarounds))
    if rule.pattern.search(line) is None:  # hypothesis ignores some conditions
        return
    assert any(text in (line.lower() if rule.ignore_case else line) for text in rule.literals)
