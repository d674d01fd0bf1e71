from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from nvrx_slurm.lab.flow.stages import diagnosis


def test_steps_that_hang_are_waited_for_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps hang, the diagnosis of an attempt has a bounded time."""
    monkeypatch.setattr(diagnosis, "STEP_S", 1.0)
    ends, began = threading.Event(), time.monotonic()
    hung = {f"hung-{number}": ends.wait for number in range(8)}
    diagnosis.take({**hung, "done": lambda: None, "failed": lambda: 1 / 0}, tmp_path)
    took_s = time.monotonic() - began
    ends.set()
    assert took_s < 4.0
    assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == {*hung, "failed"}
    assert (tmp_path / "failed.missing.txt").read_text() == "ZeroDivisionError: division by zero\n"
