"""docs/store.md: the table of keys, from their catalogue."""

from __future__ import annotations

from nvrx_slurm.store.keys import CATALOGUE


def parts() -> dict[str, str]:
    """The parts of the page."""
    rows = (
        f"| `{key.pattern}` | {key.kind} | {key.written_by} | {key.read_by} | {key.lifetime} | {key.holds} |"
        for key in CATALOGUE
    )
    head = ["| key | type | written by | read by | lives | holds |", "|---|---|---|---|---|---|"]
    return {"keys": "\n".join([*head, *rows])}
