"""The lists of `prewarm: auto`: on a file system that hangs, and in a folder that other users can write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from nvrx_slurm.agent.prewarming import Prewarming
from nvrx_slurm.jobspec.load import load
from nvrx_slurm.jobspec.plan import plan
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.util.clock import SystemClock
from tests import frozen_fs

# The agent's read of the list does not return.
AGENT = """
import asyncio, threading
from pathlib import Path

from tests.unit.agent.test_prewarming import prewarming_in

async def run():
    tasks = []
    prewarming_in(Path.cwd(), go=lambda work: tasks.append(asyncio.create_task(work))).begin()
    assert len(tasks) == 1
    while not any(thread.name == "prewarm list" for thread in threading.enumerate()):
        await asyncio.sleep(0.01)
    assert not tasks[0].done()

asyncio.run(run())
"""


def prewarming_in(folder: Path, *, go: Any = None) -> Prewarming:
    """The `Prewarming` of a job with one role and `prewarm: auto`, in this base folder."""
    job = folder / "job.yaml"
    job.write_text("name: j\ncommand: python3 train.py\nprewarm: auto\n")
    made = plan(load(job, {}).spec, folder=folder, job_file=job)
    none = cast(Any, None)
    return Prewarming(
        made,
        folder=JobFolder(folder / "1"),
        node="n1",
        workers=none,
        stacks=none,
        publisher=none,
        clock=SystemClock(),
        go=go,
    )


@pytest.mark.skipif(not frozen_fs.IS_HERE, reason="needs /dev/fuse")
def test_an_agent_ends_while_a_list_is_read(tmp_path: Path) -> None:
    """The agent ends while its read of a list hangs; it does not wait for that read."""
    lists, root = tmp_path / ".prewarm", str(Path(__file__).parents[3])
    lists.mkdir()
    with frozen_fs.frozen(lists):
        code = f"import sys; sys.path.insert(0, {root!r}){AGENT}"
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)


@pytest.mark.parametrize(("mode", "is_read"), [(0o700, True), (0o755, True), (0o777, False)])
def test_a_list_is_read_in_a_folder_that_no_other_user_can_change(tmp_path: Path, mode: int, is_read: bool) -> None:
    """A list is used only in a folder that no other user can write: it says what the warm process imports, and in a
    base folder such as /tmp another user may create the folder first."""
    prewarming = prewarming_in(tmp_path)
    role = prewarming.plan.roles[0]
    prewarming._write_list(role, ["torch"])
    file = prewarming._list_file(role)
    assert json.loads(file.read_bytes())["modules"] == ["torch"]
    file.parent.chmod(mode)
    assert prewarming._read_list(role) == (["torch"] if is_read else None)
    before = file.read_bytes()
    prewarming._write_list(role, ["numpy"])
    assert (file.read_bytes() == before) is not is_read
