"""The one module that reads the environment. Standard library only: agents import it.

Secrets come to a job in the environment that it was submitted from. The job's first process takes them out of its own
(`take_secrets`), so that no agent, supervisor or worker ever has them. The controller gets them through a descriptor
(`handed_on`), for the attribution process, which needs them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

PREFIX = "NVRX_SLURM_"

# A file that job.yaml names for one of these comes first.
STORE_PASSWORD = "NVRX_SLURM_STORE_PASSWORD"  # of a store that job.yaml names by URL
ATTRSVC_TOKEN = "NVRX_SLURM_ATTRSVC_TOKEN"  # of the attribution service, and of what `http_urls` names
SLACK_TOKEN = "NVRX_SLURM_SLACK_TOKEN"
DATAFLOW_TOKEN = "NVRX_SLURM_DATAFLOW_TOKEN"  # of the index that gets a document for each failure
LLM_KEY = "NVRX_SLURM_LLM_KEY"  # of the language model that gives a second opinion
# Variables that are no configuration keys, and that nothing may keep or show.
SECRETS = frozenset({STORE_PASSWORD, ATTRSVC_TOKEN, SLACK_TOKEN, DATAFLOW_TOKEN, LLM_KEY})

# Names the folder of job folders; no configuration key either.
FOLDER = "NVRX_SLURM_FOLDER"

# Names the descriptor of a file in memory from which a child process reads them.
SECRETS_FD = "NVRX_SECRETS_FD"

# Names the pipe by which the controller reports lost and joined nodes to the batch host, its parent.
HOST_FD = "NVRX_HOST_FD"

# Names the socket by which an agent in a container asks for what only the host can do (`agent/inside.py`).
OUTSIDE_FD = "NVRX_OUTSIDE_FD"

_taken: dict[str, str] = {}

PLAN_DIGEST = "NVRX_PLAN_SHA256"


def get(name: str) -> str | None:
    """The variable, or None where it is unset or empty; a secret also where it has been taken."""
    return os.environ.get(name) or _taken.get(name) or None


def take_secrets() -> bool:
    """Take the secrets out of this process's environment, and those that were handed on out of their descriptor.

    This module keeps them. Returns whether any stood in the environment: then /proc/<pid>/environ shows
    them until the process starts another program.
    """
    found = {name: value for name in SECRETS if (value := os.environ.pop(name, ""))}
    if descriptor := os.environ.pop(SECRETS_FD, ""):
        import json  # here, as in `handed_on`: `--help` loads this module and needs it not

        # set by hand, it names no descriptor of this tool
        with contextlib.suppress(OSError, ValueError), os.fdopen(int(descriptor), "rb") as file:
            file.seek(0)  # where it stands is shared with the process that has written it
            handed = json.load(file)
            _taken.update({name: value for name in SECRETS if isinstance(value := handed.get(name), str)})
    # Last: what stands in the environment itself is newer than what was handed on.
    _taken.update(found)
    return bool(found)


@contextlib.contextmanager
def handed_on() -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """What a child process that needs the secrets is started with: variables, and descriptors to inherit."""
    known = {name: value for name in SECRETS if (value := get(name))}
    if not known:
        yield {}, ()
        return
    import json  # here, as pathlib in `_path`: `--help` loads this module and needs neither

    descriptor = os.memfd_create("nvrx-secrets")  # close-on-exec: `pass_fds` lets this one child have it
    try:
        # A copy of it: closing the file must leave open the descriptor that the child inherits.
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(json.dumps(known).encode())
        yield {SECRETS_FD: str(descriptor)}, (descriptor,)
    finally:
        os.close(descriptor)


def overrides() -> dict[str, str]:
    """Every variable that sets a configuration key: `NVRX_SLURM_<KEY>`, a double underscore for each level."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX) and name != FOLDER}


def base_folder() -> Path | None:
    """The folder of job folders that the user names for all commands and calls."""
    return _path(FOLDER)


def job_folder() -> Path | None:
    """The running job's folder; the batch host sets it for its children."""
    return _path("NVRX_JOB_FOLDER")


def plan_digest() -> str | None:
    """The SHA-256 of the plan that the batch host runs (`files.digest_of_plan`), as it gives it to its children."""
    return get(PLAN_DIGEST)


def host_descriptor() -> int | None:
    """Where this process, a controller, reports to its batch host. No child of it inherits the descriptor."""
    return _take_descriptor(HOST_FD)


def outside_descriptor() -> int | None:
    """Where this process, an agent in a container, asks the host. No child of it inherits the descriptor."""
    with contextlib.suppress(OSError):  # a runtime may have closed it
        return _take_descriptor(OUTSIDE_FD)
    return None


def _take_descriptor(name: str) -> int | None:
    value = os.environ.pop(name, "")
    if not value.isdecimal():
        return None
    # It was inherited from the parent, and would be by every child: a worker could then use it.
    os.set_inheritable(int(value), False)
    return int(value)


def node_name() -> str | None:
    """This node's name: what the batch host or Slurm calls it. On a development cluster it is not the host name."""
    return get("NVRX_NODE") or get("SLURMD_NODENAME")


def search_path() -> str:
    """Where programs are looked for."""
    return get("PATH") or os.defpath


def own_job_id() -> str | None:
    """This job's id as squeue lists it: an array's task has a number of its own, which no user knows."""
    # Nor is that number always safe. Slurm gives the last task of an array the number of the array itself: `scontrol`
    # and `scancel` take it for all tasks.
    array, task = get("SLURM_ARRAY_JOB_ID"), get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else get("SLURM_JOB_ID")


def slurm_cluster_name() -> str | None:
    """What Slurm calls the cluster that this job runs on."""
    return get("SLURM_CLUSTER_NAME")


def slurm_configuration() -> dict[str, str]:
    """What leads Slurm's programs to their cluster, where that is not the machine's own."""
    return {"SLURM_CONF": path} if (path := get("SLURM_CONF")) else {}


def slurm_restart_count() -> int:
    """How often Slurm has requeued this job."""
    return int(get("SLURM_RESTART_COUNT") or 0)


def slurm_nodelist() -> str | None:
    """The allocation in Slurm's compressed form. Stale after a node is lost."""
    return get("SLURM_JOB_NODELIST")


def child_environment(
    extra: Mapping[str, str], *, without: Collection[str] = (), with_secrets: bool = False
) -> dict[str, str]:
    """This process's environment with `extra` on top, for a child process; `without` these variables of its own.

    `with_secrets`: the child submits jobs, which need them. No other child gets them in its environment.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in without and name not in SECRETS}
    secrets = {name: value for name in SECRETS if (value := get(name))} if with_secrets else {}
    return {**inherited, **secrets, **extra}


def adopt(extra: Mapping[str, str]) -> None:
    """Let this process, and all that it starts from now on, have these variables too."""
    os.environ.update(extra)


def is_ci() -> bool:
    """Whether this is an automated run: GitHub, GitLab and most others set `CI=true`."""
    return get("CI") == "true"


class GitHub(NamedTuple):
    """Where a step of GitHub Actions writes its results; a part is None where the runner has not set it."""

    workspace: Path | None = None  # the checkout: annotations name files from here
    step_summary: Path | None = None
    output: Path | None = None


def github() -> GitHub | None:
    """The files of this step of GitHub Actions; None outside of it."""
    if get("GITHUB_ACTIONS") != "true":
        return None
    return GitHub(*map(_path, ("GITHUB_WORKSPACE", "GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")))


def _path(name: str) -> Path | None:
    """The path in a variable, or None where it is unset or empty."""
    from pathlib import Path

    value = get(name)
    return Path(value) if value else None
