"""Fixtures for the tests of configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_site_files(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The tests do not read this machine's own site files."""
    empty = str(tmp_path_factory.mktemp("xdg"))
    monkeypatch.setenv("XDG_CONFIG_HOME", empty)
    monkeypatch.setenv("XDG_CONFIG_DIRS", empty)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Writes job.yaml into an empty current folder, so that messages name it by `job.yaml` alone."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        path = Path("job.yaml")
        path.write_text(text, encoding="utf-8")
        return path

    return write
