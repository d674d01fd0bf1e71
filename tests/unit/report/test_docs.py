"""docs/journal.md."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "journal.md"


def test_every_field_of_every_event_is_on_the_page() -> None:
    """The page has every field of every event record."""
    page = PAGE.read_text()
    for section in page.split("### ")[1:]:
        assert "| `" in section or "No fields." in section
    for field in ("survivors", "restarts_left", "phases", "master_port", "ago_s", "store_error", "waits_for"):
        assert f"| `{field}` |" in page
