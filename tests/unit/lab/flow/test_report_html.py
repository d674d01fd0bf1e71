"""The HTML report, as text. `tests/flow/test_ci_report_page.py` opens it in a browser."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

from nvrx_slurm.lab.flow import report_html
from nvrx_slurm.lab.flow.report_text import write
from tests.outcomes import HOSTILE, attempt, flow, of_every_kind, suite


class Elements(HTMLParser):
    """Every element with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_needs_nothing_else() -> None:
    """No element refers to another file, and the page's policy forbids all requests."""
    elements = Elements(report_html.page(of_every_kind())).found
    asked = [(tag, name) for tag, said in elements for name in ("src", "srcset", "action", "style") if name in said]
    assert asked == []
    assert [said["href"] for tag, said in elements if "href" in said] == ["data:,"]
    policy = next(said["content"] for _, said in elements if said.get("http-equiv") == "Content-Security-Policy")
    assert str(policy).startswith("default-src 'none'; ")


def test_only_our_own_script_and_style_may_run() -> None:
    """The policy allows one script and one style by their hashes, which are those of the page."""
    page = report_html.page(of_every_kind())
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in page


def test_hostile_texts_become_no_elements() -> None:
    """A flow with a hostile name, file and sentence gives the same elements as one with plain ones."""
    plain, hostile = flow("a", attempt(), about="b", file="c"), flow(HOSTILE, attempt(), about=HOSTILE, file=HOSTILE)
    tags = [[tag for tag, _ in Elements(report_html.page(suite(each))).found] for each in (plain, hostile)]
    assert tags[0] == tags[1]


def test_bars_lie_where_the_attempts_were() -> None:
    """An attempt in the second quarter of the run is a bar there, and a fault a line in it, on the same axis."""
    second = attempt(after_s=10.5, took_s=10.5)
    late = attempt(after_s=80.0, took_s=80.0)  # the clock of another machine
    page = report_html.page(suite(flow("second", second), flow("late", late)))
    assert '<rect class="passed" x="250" y="3" width="250" height="10"/>' in page
    assert '<path class="fault" d="M279 0V16">' in page
    assert '<rect class="passed" x="994" y="3" width="6" height="10"/>' in page


def test_a_run_without_flows_is_a_page_too() -> None:
    """It says that there are none."""
    assert "<h1>no flow</h1>" in report_html.page(suite())


def test_a_report_is_written_with_its_folders(tmp_path: Path) -> None:
    """Missing folders are created; a lone surrogate, which cannot be encoded, is written as an escape."""
    write(tmp_path / "a" / "b" / "c.html", "x\ud800")
    assert (tmp_path / "a" / "b" / "c.html").read_text() == "x\\ud800"
