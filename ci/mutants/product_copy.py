"""A copy of the product to which edits are applied, one mutant after the other."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ci.mutants.model import ROOT, Edit
from nvrx_slurm.lab.devcluster import processes
from nvrx_slurm.util.clock import SystemClock

# In the environment of all that runs in a copy: its folder.
MARK = "NVRX_MUTANTS_COPY"

COPIED = (
    "nvrx_slurm",
    "sbatch",
    "ci",
    "tests",
    "docs",
    "examples",
    "bench",
    "pyproject.toml",
    "README.md",
    "Makefile",
)


class ProductCopy:
    """The product in a folder. Compiled files are kept from mutant to mutant: only edited modules compile again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
            else:
                shutil.copy2(source, folder / name)
        # The copy comes before the editable install on sys.path, in every process that a check starts.
        self.env = {**os.environ, "PYTHONPATH": str(folder), MARK: str(folder)}
        self.env.pop("PYTHONDONTWRITEBYTECODE", None)

    def end_processes(self) -> None:
        """Kill what a check has left: a mutant may be one that ends no worker."""
        processes.kill(lambda table: processes.marked(table, MARK, str(self.folder)), SystemClock())

    @contextmanager
    def broken(self, edits: Sequence[Edit]) -> Iterator[None]:
        """With these edits inside the block. SystemExit: the text of one is not there exactly once."""
        originals: dict[Path, str] = {}
        try:
            for edit in edits:
                path = self.folder / edit.file
                text = path.read_text()
                if text.count(edit.old) != 1:
                    sys.exit(f"ci.mutants: {edit.file} has this {text.count(edit.old)} times, not once: {edit.old!r}")
                # Two edits of one file: the text before the first of them is the original.
                originals.setdefault(path, text)
                _write(path, text.replace(edit.old, edit.new))
            yield
        finally:
            for path, text in originals.items():
                _write(path, text)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    # A compiled file is taken for current by size and second: an edit of the same length within one second would be
    # missed.
    if path.suffix == ".py":
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
