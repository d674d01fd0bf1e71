"""docs/journal.md."""

from __future__ import annotations

from pathlib import Path

from nvrx_slurm.report.docs import journal_page

PAGE = Path(__file__).parents[3] / "docs" / "journal.md"


def test_the_page_is_current() -> None:
    """docs/journal.md is what `python -m nvrx_slurm.report.docs` writes."""
    assert PAGE.read_text() == journal_page(), "run: python -m nvrx_slurm.report.docs > docs/journal.md"


def test_every_field_of_every_event_is_on_the_page() -> None:
    """No field is lost between the records' source and the page."""
    page = journal_page()
    for section in page.split("### ")[1:]:
        assert "| `" in section or "No fields." in section
    for field in ("survivors", "restarts_left", "phases", "master_port", "ago_s", "store_error", "waits_for"):
        assert f"| `{field}` |" in page
