"""What a terminal, a page or a CI runner would interpret becomes visible text; all other text stays as it is."""

from __future__ import annotations

import json
import sys
import unicodedata
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.util.sanitize import (
    TerminalOutput,
    coloured,
    json_text,
    not_command_bytes,
    not_commands,
    one_line,
    only_colours,
    shown,
    uncoloured,
)

CATEGORIES = frozenset(("Cc", "Cs", "Zl", "Zp"))
BIDIRECTIONAL = frozenset(("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI", "BN"))
HARMLESS = frozenset("\n\t")
NOT_HIDDEN = range(0x1BCA0, 0x1D17B)
"""Marks of shorthand and of musical notation, which Unicode counts among the boundary-neutral ones."""

texts = st.text(alphabet=st.sampled_from("a é🛑\t\n\r\x1b[31;0m]\x07\x9b\x7f\u202e\u200b\ud800\udc9b\U000e0041:#\\"))


def test_every_control_character_becomes_visible() -> None:
    """This covers all of Unicode: terminal controls, bidi controls, line separators, halves of surrogates."""
    control = [
        char
        for char in map(chr, range(sys.maxunicode + 1))
        if unicodedata.category(char) in CATEGORIES or unicodedata.bidirectional(char) in BIDIRECTIONAL
    ]
    passed = [
        char for char in control if char not in HARMLESS and ord(char) not in NOT_HIDDEN and shown(char) == char
    ]
    assert passed == []


def test_what_people_write_stays_as_it_is() -> None:
    """Text of any language, symbols, emoji, tabs and newlines do not change."""
    text = "naïve Größe 速度 שלום مرحبا ❤️ 🛑\n\tstep 3: loss=0.1 \\x1b"
    assert (shown(text), coloured(text), only_colours(text), json_text(text)) == (text,) * 4


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("n1\u200b", r"n1\u200b"),
        ("a\rb\r\nc", "a\\rb\nc"),
        ("\udc9b\ud800", r"\x9b\ud800"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_a_control_is_shown_as_python_writes_it(text: str, seen: str) -> None:
    assert shown(text) == seen


def test_a_line_stays_one() -> None:
    """Otherwise a newline in a field would start a line that looks like the program's own."""
    assert one_line("broken\n+1.0s job_ended done\n") == r"broken\n+1.0s job_ended done"


def test_a_colour_ends_with_its_line() -> None:
    """The colour does not continue in the next line, of another rank or of the shell."""
    assert coloured("\x1b[31mred\nplain\n\x1b[1mbold\x1b[0m\n") == "\x1b[31mred\x1b[0m\nplain\n\x1b[1mbold\x1b[0m\n"
    assert uncoloured("\x1b[31mred\x1b[0m \x1b[2J") == r"red \x1b[2J"


@given(texts)
def test_what_is_shown_is_safe_everywhere(text: str) -> None:
    """It encodes to UTF-8, is valid in XML, and does not change when it is sanitized again."""
    seen = shown(text)
    assert seen.encode() and shown(seen) == seen if text else True
    element = ElementTree.Element("x", {"y": seen})
    element.text = seen
    assert ElementTree.fromstring(ElementTree.tostring(element)).text == (seen or None)
    assert "\n" not in one_line(text)


@given(st.text(st.characters(codec="utf-8")), texts)
def test_json_keeps_its_values(name: str, text: str) -> None:
    """JSON's own escapes are used, so the parsed values stay."""
    value = {name: text.encode("utf-8", "replace").decode(), "c": "##[error]"}
    safe = json_text(json.dumps(value, ensure_ascii=False))
    assert json.loads(safe) == value
    assert "##[" not in safe and shown(safe) == safe


@given(texts, st.lists(st.integers(0, 40)))
def test_output_in_pieces_is_shown_like_the_whole(text: str, cuts: list[int]) -> None:
    """Wherever the output is cut, even inside a character or a colour, the same controls are made visible."""
    data = text.encode("utf-8", "surrogateescape" if "\ud800" not in text else "replace")
    whole, parts = TerminalOutput(), TerminalOutput()
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    pieces = [data[start:end] for start, end in pairwise(ends)]
    once = whole.feed(data) + whole.feed(b"", final=True)
    again = "".join(map(parts.feed, pieces)) + parts.feed(b"", final=True)
    assert uncoloured(again) == uncoloured(once)
    assert only_colours(again) == again


@given(texts)
def test_no_line_is_a_workflow_command(text: str) -> None:
    """GitHub's runner looks for `::` at the start of a line, after blanks, and for `##[` anywhere in it."""
    lines = not_commands(f" ::error::x\n{text}##[group]x\n\t::debug::").split("\n")
    assert not [line for line in lines if line.lstrip().startswith("::") or "##[" in line]
    data = not_command_bytes(b" ::stop-commands::x ##[error]")
    assert data == rb" \x3a:stop-commands::x #\x23[error]"
