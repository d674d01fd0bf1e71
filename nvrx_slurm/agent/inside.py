"""`python -m nvrx_slurm.agent.inside`: what the batch host starts on each node where the agents run in the job's
container. It becomes the runtime, and the image's `python3` becomes the agent.

ch-run replaces this process. With apptainer it stays, as for a worker (`contained.py`): it passes signals on, and
ends as the agent ends; where it is killed the agent is killed too. The agent has the host's process ids, network,
/dev/shm and user, as a worker in a container does (`container.py`), so liveness, fence, stacks and rings work as
outside.

`scontrol` is on the host alone: a process that stays outside runs it for the agent.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from importlib import metadata
from typing import NoReturn

from msgspec.structs import replace

from nvrx_slurm.agent import container
from nvrx_slurm.agent.contained import Contained
from nvrx_slurm.errors import NvrxError, UsageError
from nvrx_slurm.jobspec import env as environment
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.util.processes import CANNOT_RUN

REQUEUE = b"requeue"
SCONTROL_S = 60.0
ANSWER_BYTES = 4096

# What the image's python3 runs: it says what is missing in one line. The job's version, and how it ends
# then, follow.
_AGENT = """\
import sys
from importlib import metadata
wanted, cannot_run = sys.argv[1:]
why, install = "", f"`pip install nvrx-slurm=={wanted}` in the image"
try:
    from nvrx_slurm.agent.__main__ import run
    if (version := metadata.version("nvrx-slurm")) != wanted:
        why = f"it has nvrx-slurm {version}, and the job has {wanted}: {install}"
except metadata.PackageNotFoundError:
    pass
except ImportError as error:
    python = f"its python3 ({sys.version.split()[0]})"
    why = f"{python} has no nvrx-slurm that works ({error}): {install}, or set container.agents to outside"
if why:
    print("nvrx-slurm agent: error: container.image:", why, file=sys.stderr)
    sys.exit(int(cannot_run))
run()
"""


def plan_inside(plan: Plan) -> Plan:
    """The plan for an agent that runs in the job's container: its workers are in it already."""
    inside = plan.roles[0].container
    if inside is None or not inside.agents_inside:
        return plan
    # The host's PYTHONPATH leads nowhere in there; only pyxis passes it.
    unset = {"PYTHONPATH": ""} if inside.runtime == "pyxis" else {}
    roles = tuple(
        replace(role, container=None, workdir=inside.workdir or role.workdir, env={**unset, **role.env})
        for role in plan.roles
    )
    return replace(plan, roles=roles)


def main() -> NoReturn:
    """Become the runtime of this node's agent. Raises UsageError; CannotStart where no runtime can."""
    folder = environment.job_folder()
    if folder is None:
        raise UsageError("an agent is started by the job, with NVRX_JOB_FOLDER in its environment")
    plan = JobFolder(folder).read_plan(environment.plan_digest())
    inside = plan.roles[0].container
    if inside is None or not inside.agents_inside:
        raise UsageError("job.yaml has the agents outside of its container: start `python -m nvrx_slurm.agent`")
    # Variables of the host that name its own libraries and modules.
    own = environment.child_environment({}, without=(*container.HOST_ONLY, "PYTHONPATH"))
    own.setdefault("USER", str(os.getuid()))  # ch-run wants one
    command = ("python3", "-P", "-c", _AGENT, metadata.version("nvrx-slurm"), str(CANNOT_RUN))
    folders = [plan.folder, plan.workdir, *(role.workdir for role in plan.roles if role.workdir)]
    program, argv = container.agent_command(inside, command, folders, plan.workdir, own)
    if shutil.which("scontrol") is not None:
        own[environment.OUTSIDE_FD] = str(_stay_outside())
    if program.endswith("/ch-run"):  # which becomes what it starts
        os.execve(program, argv, own)
    # The kernel lets apptainer forget whom it dies with: this process stays, and the agent dies with it. The agent is
    # below the runtime as a worker is, and its own workers are not: they must not get the variable that says so.
    own = {name: value for name, value in own.items() if not name.endswith("ENV_NVRX_BELOW_RUNTIME")}
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # with it Slurm announces a suspension; it is for the agent
    Contained(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)).run(command[0], argv, own)


# ------------------------------------------------------------------------------- what the agent asks the host for


def _stay_outside() -> int:
    """Leave a process outside that runs `scontrol requeue` when it is asked to. Returns the agent's end of a socket:
    the process ends when the last holder of that has ended."""
    far, near = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        status = 0
        try:
            # Slurm signals every process of the step. This one is needed after the agent's own end has begun.
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, signal.SIG_IGN)
            near.close()
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(null, descriptor)
            if far.recv(ANSWER_BYTES) == REQUEUE and (job_id := environment.own_job_id()):
                far.send(requeue(job_id).encode()[:ANSWER_BYTES])
        except OSError:  # the agent does not wait for the answer any more
            status = 1
        finally:
            os._exit(status)
    far.close()
    near.set_inheritable(True)
    return near.detach()


def requeue(job_id: str) -> str:
    """Have Slurm requeue the job. Returns what scontrol said."""
    try:
        asked = subprocess.run(
            ["scontrol", "requeue", job_id], capture_output=True, text=True, timeout=SCONTROL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"that failed: {error}"
    return f"scontrol: {asked.stderr.strip() or 'done'}"


def requeue_from_inside(job_id: str, outside: int | None) -> str:
    """The same for an agent that may be in a container. `outside`: its end of the socket."""
    if outside is None:
        return requeue(job_id)
    with contextlib.suppress(OSError), socket.socket(fileno=outside) as near:
        near.settimeout(SCONTROL_S + 5.0)
        near.send(REQUEUE)
        return near.recv(ANSWER_BYTES).decode()
    return "the process outside of the container does not answer"


if __name__ == "__main__":
    try:
        main()
    except (NvrxError, container.CannotStart) as error:
        print(f"nvrx-slurm agent: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, NvrxError) else CANNOT_RUN)
