"""What nvidia-smi says of a GPU's memory: errors that were corrected or not, and rows that were replaced."""

from __future__ import annotations

from collections.abc import Iterator

FIELDS = {
    "index": "",
    "pci.bus_id": "bus",
    "ecc.errors.uncorrected.volatile.total": "uncorrected errors since the driver was loaded",
    "ecc.errors.uncorrected.aggregate.total": "ever",
    "remapped_rows.uncorrectable": "rows remapped",
    "remapped_rows.pending": "pending",
    "remapped_rows.failure": "failed",
    "retired_pages.pending": "page retirement pending",
    "temperature.gpu": "temperature",
}
"""Field of `--query-gpu` → what it is called."""

QUERY = (f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
"""What nvidia-smi is asked."""

_UNKNOWN = ("[N/A]", "N/A", "[Not Supported]", "[Unknown Error]")


def rows(said: str) -> Iterator[str]:
    """One sentence for each GPU, of what nvidia-smi has printed; what it says instead of that, as it stands."""
    for line in said.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(FIELDS):
            yield line.strip()
            continue
        told = zip(FIELDS.values(), cells, strict=True)
        known = [f"{name} {cell}" for name, cell in told if name and cell not in _UNKNOWN]
        yield f"{cells[0]}: {', '.join(known)}"
