"""Writes the files of a dump, where the file system may not answer."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from nvrx_slurm.util.files import open_log, write_all


class Writing:
    """Appends texts to files, one a label; what has come of it so far can be read from another thread."""

    def __init__(self, out: Path, texts: Mapping[str, str]) -> None:
        self._texts = texts
        self._paths = {label: out / file_name(label) for label in texts}
        self._written: dict[str, Path] = {}
        self._failed: dict[str, str] = {}

    def run(self) -> None:
        """Write all of them. May block for as long as the file system does; raises nothing."""
        for label, path in self._paths.items():
            try:
                _append(path, self._texts[label])
            except OSError as error:
                self._failed[label] = f"{path}: {error.strerror}; the stacks of {label} are lost"
            else:
                self._written[label] = path

    def files(self) -> dict[str, Path]:
        """Label → file, of those written by now."""
        return dict(self._written)

    def problems(self) -> tuple[str, ...]:
        """One sentence for each label whose file is not written."""
        late = "its file system did not take the stacks in time; they may still arrive"
        return tuple(
            self._failed.get(label, f"{path}: {late}")
            for label, path in self._paths.items()
            if label not in self._written
        )


def file_name(label: str) -> str:
    """`rank 3` is written to `rank-3.txt`."""
    return re.sub(r"[\s/]+", "-", label) + ".txt"


def _append(path: Path, text: str) -> None:
    descriptor = open_log(path)
    try:
        write_all(descriptor, text.encode(errors="replace"))
    finally:
        os.close(descriptor)
