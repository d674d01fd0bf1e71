"""docs/journal.md."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec

from nvrx_slurm.journal.records import AnyRecord
from nvrx_slurm.report.words import event_name

PAGE = Path(__file__).parents[3] / "docs" / "journal.md"


def test_every_field_of_every_event_is_on_the_page() -> None:
    """The section of each event record has a row for each of its fields, and no other section names them instead."""
    sections = {part.partition("\n")[0].strip("`"): part for part in PAGE.read_text().split("### ")[1:]}
    for kind in get_args(AnyRecord):
        fields = [field.encode_name for field in msgspec.structs.fields(kind)]
        section = sections[event_name(kind)]
        assert all(f"| `{field}` |" in section for field in fields)
        assert fields or "No fields." in section
