"""README.md, docs/ and the other pages: their links, and the recorded picture."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/*/*.md", "bench/*.md", "tests/corpus/*.md")
    for page in ROOT.glob(pattern)
)
_LINK = re.compile(r"\]\(([^()\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")


def prose(page: Path) -> str:
    """The page without its code, where brackets are no links."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings: lower case, no punctuation, blanks as hyphens, numbered."""
    found: set[str] = set()
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ +(.*?) *#*$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    """Links to other sites are not followed."""
    broken = []
    for groups in _LINK.findall(prose(page)):
        link = unquote(groups[0] or groups[1])
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_index() -> None:
    """docs/README.md links each page of docs/, except the decisions."""
    linked = set(_LINK.findall(prose(ROOT / "docs" / "README.md")))
    links = {(ROOT / "docs" / (first or second)).resolve() for first, second in linked}
    assert [page for page in (ROOT / "docs").glob("*.md") if page.name != "README.md" and page not in links] == []


@pytest.mark.parametrize("name", ["demo.svg", "demo-still.svg"])
def test_the_recording_needs_nothing_from_elsewhere(name: str) -> None:
    """It is a well-formed SVG below 200 KB that loads no script, link or font."""
    picture = (ROOT / "docs" / name).read_bytes()
    assert len(picture) < 200_000
    tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(picture).iter()}
    assert tags == {"svg", "title", "desc", "style", "defs", "g", "use", "text", "rect", "circle"}
    assert re.findall(rb"url\(|@import|@font-face|href=\"[^#]", picture) == []
