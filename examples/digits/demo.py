"""`make demo`: train twice, once in peace and once with a node killed midway, and compare.

No Slurm, no Redis, no root: the nodes are processes of this machine, and the store is the embedded one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import nvrx_slurm as nv
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import Entry, NodeJoined, NodeLost, Progress
from nvrx_slurm.lab.faults.node import kill_local_node
from nvrx_slurm.report.model import ReceivedHeartbeat
from nvrx_slurm.report.source import Journal, so_far

HERE = Path(__file__).parent
STEPS = 300
KILL_AT_STEP = 150
VICTIM = "n2"


@dataclass(frozen=True, slots=True)
class Run:
    """One training: its job's folder, exit code, and what it wrote when it ended."""

    folder: JobFolder
    exit_code: int
    result: dict[str, float]


def train(base: Path, name: str, *, step_time: float, kill: bool) -> Run:
    """Run the example's job with its own checkpoints; on the live screen where a node is killed."""
    checkpoints = base / f"checkpoints-{name}"
    command = [sys.executable, "train.py", "--steps", str(STEPS), "--step-time", str(step_time)]
    command += ["--checkpoint-every", "10", "--checkpoint-dir", str(checkpoints)]
    spec = nv.load_job(HERE / "job.yaml", name=f"digits-{name}", command=command, workdir=str(HERE))
    job = nv.submit(spec, cluster="local", folder=base)
    folder = JobFolder(base / job.job_id)
    if kill:
        threading.Thread(target=kill_midway, args=(folder,), daemon=True).start()
        from nvrx_slurm.report.live import watch

        watch(base, job.job_id)
    code = job.wait(timeout=300)
    result = json.loads((checkpoints / "result.json").read_text()) if code == 0 else {}
    return Run(folder, code, result)


def kill_midway(folder: JobFolder) -> None:
    """SIGKILL to every process of one node, once its workers have come half of the way."""
    journal = Journal(folder, beats=True)
    agent = 0
    while not journal.ended:
        for item in journal.poll(0.5):
            if isinstance(item, Entry) and isinstance(item.record, NodeJoined) and item.record.node == VICTIM:
                agent = item.record.pid
            if isinstance(item, ReceivedHeartbeat) and max(item.heartbeat.steps.values(), default=0) >= KILL_AT_STEP:
                kill_local_node(agent)
                journal.close()
                return


def death_to_step_s(folder: JobFolder) -> float | None:
    """From the moment at which the controller knew of the death to the first step after it, in seconds."""
    lost: float | None = None
    for entry in so_far(folder, live=False):
        if isinstance(entry.record, NodeLost):
            lost = entry.t
        elif lost is not None and isinstance(entry.record, Progress):
            return entry.t - lost
    return None


def main() -> int:
    """Both runs, and the comparison; 0 if the loss is the same."""
    base = Path(os.environ.get("NVRX_DEMO_FOLDER") or tempfile.mkdtemp(prefix="nvrx-demo-"))
    print(f"digits on 4 nodes × 2 workers, 2 hot spares. First {STEPS} steps in peace, to compare with …", flush=True)
    calm = train(base, "calm", step_time=0.0, kill=False)
    print(f"… loss {calm.result.get('loss')}. Again, with {VICTIM} killed at step {KILL_AT_STEP}:\n", flush=True)
    struck = train(base, "struck", step_time=0.02, kill=True)
    if calm.exit_code or struck.exit_code:
        failed = calm if calm.exit_code else struck
        print(f"\nthe job ended with {failed.exit_code}; see {failed.folder.job_log}", file=sys.stderr)
        return 1
    return report(calm, struck)


def report(calm: Run, struck: Run) -> int:
    took_s = death_to_step_s(struck.folder)
    same = calm.result["loss"] == struck.result["loss"]
    print()
    print(f"from the death to the first step after it   {took_s * 1000:.0f} ms" if took_s else "no node was lost")
    print(f"loss without a fault                        {calm.result['loss']!r}")
    print(f"loss with a node killed at step {KILL_AT_STEP}         {struck.result['loss']!r}")
    print(f"                                            {'the same, bit for bit' if same else 'DIFFERENT'}")
    print(f"logs, journal, checkpoints                  {struck.folder.path.parent}")
    return 0 if same and took_s else 1


if __name__ == "__main__":
    sys.exit(main())
