"""docs/store.md."""

from __future__ import annotations

from pathlib import Path

from nvrx_slurm.store.docs import store_page
from nvrx_slurm.store.keys import CATALOGUE, Keys

PAGE = Path(__file__).parents[3] / "docs" / "store.md"


def test_the_page_is_current() -> None:
    """docs/store.md is what `python -m nvrx_slurm.store.docs` writes."""
    assert PAGE.read_text() == store_page(), "run: python -m nvrx_slurm.store.docs > docs/store.md"


def test_every_key_in_use_is_in_the_catalogue() -> None:
    """A key that the code can name has its row."""
    keys = Keys("7")
    named = {value for value in vars(keys).values() if value != "nvrx:{7}:"}
    named |= {keys.round("main", 0, 1), keys.shutdown(0)}
    stems = {name.removeprefix("nvrx:{7}:").partition(":")[0] for name in named}
    assert stems == {row.pattern.partition(":")[0] for row in CATALOGUE}
