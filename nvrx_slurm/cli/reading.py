"""What `status`, `logs` and `events` share: the base folder."""

from __future__ import annotations

from pathlib import Path

import click

folder_option = click.option(
    "--folder",
    "base",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("nvrx-jobs"),
    show_default="./nvrx-jobs",
    help="The base folder, which holds a folder for each job.",
)
