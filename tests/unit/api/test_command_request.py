"""What a user may ask a rank's agent to run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nvrx_slurm.api.command_request import CommandRequest
from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal.folder import StoreAddress
from nvrx_slurm.report import snapshot
from tests.unit.report.recorder import JOB, to_first_cycle, write


def test_argument_that_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument that is not UTF-8 is refused before anything is posted; the message shows the argument, and says
    what to do."""
    folder = write(tmp_path, to_first_cycle())
    shot = replace(snapshot.take(folder), state="running")
    monkeypatch.setattr(snapshot, "take", lambda *_, **__: shot)
    folder.write_store(StoreAddress(url="redis://127.0.0.1:1", job=JOB, token="t"))
    request = CommandRequest(folder)
    with pytest.raises(UsageError, match=r"'caf\\udce9' is not UTF-8.* into a script"):
        request.run(["ls", "caf\udce9"], 0, None, lambda data, is_error: None, timeout_s=1.0)
    request.close()
