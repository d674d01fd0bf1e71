"""The generated parts of docs/*.md: `python -m ci.pages` writes them from the code, as `make docs` does.

A page marks where they belong, on lines of their own or within a sentence:

    <!-- generated: keys -->…<!-- end -->

All else on the page is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from ci.pages import flows, job_yaml, journal, rules, store
from nvrx_slurm.inprocess import cycle
from nvrx_slurm.transport import slots

DOCS = Path(__file__).parents[2] / "docs"

# What each page's parts are named, and their text.
PAGES: Mapping[str, Callable[[], Mapping[str, str]]] = {
    "flows.md": flows.parts,
    "inprocess.md": lambda: {"diagram": f"```mermaid\n{cycle.diagram()}\n```"},
    "job-yaml.md": job_yaml.parts,
    "journal.md": journal.parts,
    "rules.md": rules.parts,
    "store.md": store.parts,
    "transport.md": lambda: {"diagram": f"```mermaid\n{slots.diagram()}\n```"},
}

_MARKED = re.compile(r"<!-- generated: ([\w-]+) -->.*?<!-- end -->", re.DOTALL)


def with_parts(page: str, parts: Mapping[str, str]) -> str:
    """The page with each part between its marks. Raises ValueError where the page has other ones."""
    marked = _MARKED.findall(page)
    if sorted(marked) != sorted(parts):
        raise ValueError(f"the page has marks for {sorted(marked)}, and its parts are {sorted(parts)}")

    def written(found: re.Match[str]) -> str:
        text = parts[found[1]].strip("\n")
        around = "\n\n" if "\n" in text else ""
        return f"<!-- generated: {found[1]} -->{around}{text}{around}<!-- end -->"

    return _MARKED.sub(written, page)
