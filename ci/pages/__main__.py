"""Writes the generated parts of docs/*.md: `python -m ci.pages`."""

from ci.pages import DOCS, PAGES, with_parts

for name, parts in PAGES.items():
    path = DOCS / name
    path.write_text(with_parts(path.read_text(), parts()))
