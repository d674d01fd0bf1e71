"""The generated parts of docs/*.md, and the table of benchmarks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.__main__ import BENCHMARKS
from ci.pages import DOCS, PAGES, with_parts


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_current(name: str) -> None:
    """The generated parts of the page match the code."""
    page = (DOCS / name).read_text()
    assert with_parts(page, PAGES[name]()) == page, "run: python -m ci.pages"


def test_no_page_has_marks_that_nothing_writes() -> None:
    """Each page with a generated part is written by `ci.pages`."""
    assert {path.name for path in Path(DOCS).rglob("*.md") if "<!-- generated: " in path.read_text()} == set(PAGES)


def test_each_benchmark_has_a_row() -> None:
    """The table of bench/README.md says what each measures, against what, and its target."""
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS.parent / "bench" / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(BENCHMARKS)


def test_a_part_stands_on_its_own_lines_or_in_a_sentence() -> None:
    """Both kinds of part are filled; filling them again changes nothing."""
    page = "# A\n\n<!-- generated: table --><!-- end -->\n\nAt most <!-- generated: most -->1<!-- end --> of them.\n"
    written = with_parts(page, {"table": "| a |\n| b |\n", "most": "2"})
    assert written == (
        "# A\n\n<!-- generated: table -->\n\n| a |\n| b |\n\n<!-- end -->\n\n"
        "At most <!-- generated: most -->2<!-- end --> of them.\n"
    )
    assert with_parts(written, {"table": "| a |\n| b |\n", "most": "2"}) == written


@pytest.mark.parametrize("parts", [{}, {"table": "", "other": ""}])
def test_a_page_without_a_place_for_a_part_is_refused(parts: dict[str, str]) -> None:
    """A mark for which there is no part is refused too."""
    with pytest.raises(ValueError, match="table"):
        with_parts("<!-- generated: table --><!-- end -->", parts)
