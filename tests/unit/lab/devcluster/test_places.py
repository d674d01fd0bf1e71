"""The folders of a development cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.lab.devcluster.places import claim, clusters_folder


def test_a_claim_that_fails_leaves_the_name_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name with its prefix is too long for the folder in /tmp."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(OSError, match="File name too long"):
        claim("x" * 250)
    assert list(clusters_folder().iterdir()) == []
