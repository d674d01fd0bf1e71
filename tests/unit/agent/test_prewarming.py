"""The lists of `prewarm: auto`, in a file system that hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# The FIFO is opened for writing, and never written: the agent's read of the list does not come back.
AGENT = """
import asyncio, os
from pathlib import Path
from types import SimpleNamespace

from nvrx_slurm.agent.prewarming import Prewarming
from nvrx_slurm.jobspec.load import load
from nvrx_slurm.jobspec.plan import plan
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.util.clock import SystemClock

job = Path("job.yaml")
job.write_text("name: j\\ncommand: python3 train.py\\nprewarm: auto\\n")
made = plan(load(job, {}).spec, folder=Path.cwd(), job_file=job)

async def run():
    tasks = []
    prewarming = Prewarming(
        made,
        folder=JobFolder(Path("jobs/1")),
        node="n1",
        workers=None,
        stacks=None,
        publisher=None,
        clock=SystemClock(),
        go=lambda work: tasks.append(asyncio.create_task(work)),
    )
    file = prewarming._list_file(made.roles[0])
    file.parent.mkdir()
    os.mkfifo(file)
    prewarming.begin()
    assert len(tasks) == 1
    await asyncio.to_thread(os.open, file, os.O_WRONLY)  # returns once a reader has opened it
    assert not tasks[0].done()

asyncio.run(run())
"""


def test_an_agent_ends_while_a_list_is_read(tmp_path: Path) -> None:
    """The read hangs, and the process does not wait for it at its end."""
    subprocess.run([sys.executable, "-c", AGENT], cwd=tmp_path, check=True, timeout=60)
