"""The prefilter leaves out no rule that matches."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nvrx_slurm.attribution.rules.catalogue import Catalogue, load_catalogue
from nvrx_slurm.attribution.scan.prefilter import Prefilter, Searcher, search_factory
from tests.unit.attribution.scan.logs import rule

_ATOMS = st.sampled_from(
    [
        r"ab",
        r"\d",
        r"[^a-c]",
        r".",
        r"\w+",
        r"\s?",
        r"^",
        r"$",
        r"\b",
        r"\B",
        r"\Z",
        r"x{2,3}",
        r"x{,3}",
        r"(?=a)",
        r"(?<!b)",
        r"(?i:B)",
        r"[a-c[:.:]",
        r"[]\[x]",
    ]
)
_PATTERNS = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.tuples(inner, inner).map(lambda both: f"(?:{both[0]}|{both[1]})"),
        inner.map(lambda one: f"(?:{one})?"),
    ),
    max_leaves=6,
)


_LABELS = [
    "",
    "[rank3]: ",
    " 7: ",
    "n7: 12: ",
    "[1,3]<stderr>:",
    "[prterun-n1-100629@1,3][n1:7]<stderr>: ",
    "[default0]:[rank3]:",
    "[main-0 3] ",
    "  | ",
    "50%\r",
]


@settings(max_examples=60)  # each compiles twice
@given(pattern=_PATTERNS, line=st.text("abcABCx1 ._", max_size=12), before=st.sampled_from(_LABELS))
def test_whole_patterns(pattern: str, line: str, before: str) -> None:
    """If a pattern matches a line, with or without its label, the form for Vectorscan matches too."""
    searched = rule("any", pattern, "ab")
    if re.search(pattern, line):
        searcher = Searcher(Prefilter(Catalogue((searched,))))
        text = f"above\n{before}{line}\nbelow".encode()
        assert searcher.present(text) == [0]
        assert searcher.may_match(0, text)


def test_reference_to_a_group() -> None:
    """A reference to a group that has matched is checked by the pattern alone, not by the prefilter."""
    searcher = Searcher(Prefilter(Catalogue((rule("twice", r"(?P<word>\w+) (?P=word)", "ab"),))))
    assert searcher.may_match(0, b"so so")


@pytest.mark.timeout(400)  # compiling needs much processor time, which other tests use too
def test_shipped_patterns() -> None:
    """Vectorscan accepts the pattern of every shipped rule, and finds the rule's samples."""
    rules = Prefilter(load_catalogue()).rules
    found = search_factory()(rules, "patterns", None)()
    for number, each in enumerate(rules):
        for sample in each.sample:
            if each.pattern.search(sample.encode()):
                assert number in found(sample.encode()), each.name


def test_a_pattern_too_large() -> None:
    """A pattern that Vectorscan refuses is searched for by its literals; other rules are found as usual."""
    too_large = replace(
        rule("large", "x", "telling"), pattern=re.compile(b"(?:" + b"[ab]{9}x" * 12_000 + b")|telling")
    )
    found = Searcher(Prefilter(Catalogue((too_large, rule("other", "abc", "abc")))))
    assert found.present(b"telling") == [0]
    assert found.present(b"abc") == [1]
