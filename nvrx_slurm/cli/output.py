"""What several commands print alike: JSON, and facts with a table. Nothing is loaded before it is printed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from nvrx_slurm.report.tables import Row, Table


def print_json(value: Any) -> None:
    """One object, indented for people."""
    import msgspec

    from nvrx_slurm.util.sanitize import json_text

    click.echo(json_text(msgspec.json.format(msgspec.json.encode(value), indent=2)))


def print_facts(rows: Sequence[Row], table: Table) -> None:
    """Labels with their texts, then the table, if it has rows: in colour on a terminal."""
    if sys.stdout.isatty():
        from nvrx_slurm.report import screen

        screen.show_facts(rows, table)
    else:
        from nvrx_slurm.report import plain

        click.echo("\n\n".join([plain.pairs(rows), *([plain.table(table)] if table.rows else [])]))
