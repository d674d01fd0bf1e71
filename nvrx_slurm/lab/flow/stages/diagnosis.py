"""Files about a job that went wrong, and what is left of a job that has ended. Every step is bounded, and a step that
fails does not stop the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path

from nvrx_slurm.api.handle import Job
from nvrx_slurm.api.stack_request import StackRequest
from nvrx_slurm.cluster.commands import Runner
from nvrx_slurm.journal.folder import JobFolder, clear_runtime_folders
from nvrx_slurm.lab.flow.stages.remote import AccountOrder, Reach
from nvrx_slurm.util.files import JobFiles
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.threads import in_thread

DUMP_S, ANSWER_S = 8.0, 5.0
STEP_S = 20.0
TAIL_LINES = 200

# What Slurm is asked, by the name of the file that has its answer.
QUESTIONS: Mapping[str, Sequence[str]] = {
    "job": ("scontrol", "show", "job", "--details"),
    "step": ("scontrol", "show", "step"),
    "node": ("scontrol", "show", "node"),
    "squeue": ("squeue", "--states=all", "--long"),
    "steps": ("squeue", "--steps", "--long"),
    "sinfo": ("sinfo", "--Node", "--long"),
}


def take(steps: Mapping[str, Callable[[], object]], folder: Path) -> None:
    """Do all steps side by side; of one that fails or takes too long the reason is in `<name>.missing.txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    # Each in a daemon thread: a step may hang in a file system that does not answer.
    running = {name: in_thread(step, f"diagnosis: {name}") for name, step in steps.items()}
    done, _ = wait(running.values(), timeout=STEP_S)
    for name, step in running.items():
        if step not in done:
            why = f"it took longer than {STEP_S:g} s"
        elif error := step.exception():  # any error: the other steps may still find the cause
            why = f"{type(error).__name__}: {error}"
        else:
            continue
        (folder / f"{name}.missing.txt").write_text(f"{why}\n")


def worker_stacks(job: Job, out: Path) -> None:
    """The toolkit's own dump of every rank. Raises what `StackRequest` raises."""
    out.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    for answer in StackRequest(JobFolder(job.folder)).answers(DUMP_S):
        for stacks in answer.stacks:
            (out / f"{stacks.replica}-rank-{stacks.rank}.txt").write_text(stacks.text)
        problems += answer.problems
    if problems:
        (out / "problems.txt").write_text("\n".join(problems) + "\n")


def process_accounts(job: Job, reach: Reach, node: str, out: Path) -> None:
    """Stacks and /proc of each process of the job on a node, the control plane included. Raises FaultFailed."""
    reach(AccountOrder(folder=str(job.folder), out=str(out), node=node), node)


def slurm_answers(runner: Runner, out: Path) -> None:
    """What Slurm says of all jobs, steps and nodes."""
    out.mkdir(parents=True, exist_ok=True)
    for name, question in QUESTIONS.items():
        answer = runner(question, timeout_s=ANSWER_S)
        (out / f"{name}.txt").write_text(f"$ {' '.join(question)}\n{answer.stdout}{answer.stderr}")


def log_tails(logs: Iterable[Path], out: Path) -> None:
    """The last lines of each log."""
    out.mkdir(parents=True, exist_ok=True)
    for log in logs:
        with log.open(errors="replace") as file:
            (out / log.name).write_text("".join(deque(file, TAIL_LINES)))


def logs_of(job: Job) -> list[Path]:
    """Every log of the job that there is."""
    kept = [job.folder / "job.log", job.folder / "host.log", *job.folder.parent.glob("slurm-*.out")]
    return [path for path in (*kept, *sorted((job.folder / "nodes").glob("*.log"))) if path.is_file()]


log = get_logger("ci")


def folders_left(job: Job, killed: Collection[str]) -> list[str]:
    """The job's folders in this machine's memory. Those of a killed node are cleared here: no process is left to
    do it."""
    files = JobFiles(job.folder)
    found = files.runtime_folders()
    expected = [path for node in killed for path in files.runtime_folders(node)]
    left = [path for path in found if path not in expected]
    if found and not left:
        log.info("left by nodes that were killed, and cleared away: %s", ", ".join(map(str, found)))
        clear_runtime_folders(files)
    return [f"{path} was not cleared away" for path in left]
