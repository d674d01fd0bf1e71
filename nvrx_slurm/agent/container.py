"""A worker in a container: the program that the supervisor starts in the worker's place. Standard library only.

It looks at the image, the mounts and the runtimes of this node, in the worker's own process: a file system that does
not answer holds up this worker and no agent. Then

- ch-run replaces this process, and the worker ch-run: what the supervisor does to its child (signals, exit code,
  PR_SET_PDEATHSIG) it does to the worker;
- with apptainer and podman this process stays, as what the supervisor sees of the worker (`contained.py`).

In every case the worker keeps the host's process ids, network, /dev/shm and user: ranks find each other, the agent
finds the stacks of a worker, and the job's files belong to the user. docs/containers.md has the whole list.

What cannot be started is reported on the descriptor that NVRX_START_FD names, as any program that cannot be executed.
"""

# ruff: noqa: PTH100, PTH103, PTH104, PTH120  a process for each worker: no import of pathlib
from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from nvrx_slurm.jobspec.container import ContainerSpec

# Set by the supervisor to the pipe that says why a program does not run; closed by execve once it does.
START_FD = "NVRX_START_FD"

# Where the image itself sets none. The host's PATH may lead into a mounted environment of another Python.
PATH_INSIDE = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Variables of the host that name its libraries, and would break the image's programs.
HOST_ONLY = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME", "VIRTUAL_ENV")

PROGRAMS = {"apptainer": ("apptainer", "singularity"), "charliecloud": ("ch-run",), "podman": ("podman",)}
# What `import nvrx_slurm.workload` needs; in every container, behind the image's own packages.
LENT = ("__init__.py", "util/__init__.py", "util/durations.py", "workload")

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_HOOK = f"{_PACKAGE}/diagnostics/stacks/hook"
# This program's command; what it is to run follows, as JSON.
PROGRAM = (
    *(sys.executable, "-P", "-S", "-E", "-c"),
    "import sys; sys.path.append(sys.argv[1]); from nvrx_slurm.agent.container import main; main()",
    os.path.dirname(_PACKAGE),
)


class CannotStart(Exception):
    """Why this worker cannot run here: a sentence for the journal."""


class Launch:
    """What a runtime is to start: `command` in the `image`, in the folder `inside`. `program`: the runtime's; `env`:
    of the runtime, too; `own`: those of its variables that come before the image's own."""

    def __init__(
        self,
        program: str,
        image: str,
        command: Sequence[str],
        mounts: Sequence[Sequence[str]],
        inside: str,
        env: dict[str, str],
        own: Sequence[str],
    ) -> None:
        self.program, self.image, self.command, self.mounts = program, image, command, mounts
        self.inside, self.env, self.own = inside, env, own


def label_of(job: str, node: str) -> str:
    """How the names of a node's containers begin. `job`: as its runtime folders are named, since a machine may have
    several jobs of one id (of two clusters), and several pretended nodes."""
    return f"{job}-{node}-"


def main() -> NoReturn:
    """Become the runtime of the worker that argv describes, or report why not."""
    pipe = int(os.environ.pop(START_FD))
    os.set_inheritable(pipe, False)
    try:
        _start(json.loads(sys.argv[2]), pipe)
    except (CannotStart, OSError) as error:
        os.write(pipe, str(error).encode()[:4096])
    os._exit(127)


def _start(order: dict[str, Any], pipe: int) -> None:
    command, image, own = order["command"], order["image"], order["own"]
    env = dict(os.environ)
    env.setdefault("USER", str(os.getuid()))  # ch-run wants one
    for name in HOST_ONLY:
        if name not in own:
            env[name] = ""  # an empty one counts for none, with each of them
    runtime, program = find_runtime(order["runtime"], order["takes"], env.get("PATH", os.defpath))
    mounts = mounts_of(image, order["mounts"], order["shared"])
    lib = lend_package(os.path.dirname(env["NVRX_BEAT_SOCKET"]))
    env["PYTHONPATH"] = env.get("PYTHONPATH", "").replace(_HOOK, f"{lib}/hook")
    env["NVRX_PACKAGES"] = lib
    own.append("NVRX_PACKAGES")
    if os.path.isdir(image):
        look_inside(image, command[0], mounts, env["PATH"] if "PATH" in own else PATH_INSIDE)
    launch = Launch(program, image, command, mounts, order["inside"], env, own)
    if runtime == "charliecloud":
        os.execve(program, charliecloud_command(launch), env)
    from nvrx_slurm.agent import contained

    if runtime == "apptainer":
        contained.Contained(pipe).run(command[0], apptainer_command(launch), env)
    contained.serve_podman(launch, label=order["label"], path=PATH_INSIDE, pipe=pipe)


def agent_command(
    inside: ContainerSpec, command: Sequence[str], folders: Sequence[str], workdir: str, env: dict[str, str]
) -> tuple[str, list[str]]:
    """The runtime's program and command line for an agent that runs inside (`inside.py`). `env` is added to.

    Raises CannotStart."""
    runtime, program = find_runtime(inside.runtime, inside.takes, env.get("PATH", os.defpath))
    mounts = mounts_of(inside.image, inside.mounts, folders)
    if os.path.isdir(inside.image):
        look_inside(inside.image, command[0], mounts, PATH_INSIDE)
    own = sorted(name for name in env if name.startswith(("NVRX_", "SLURM")))  # the image's own come after these
    compose = charliecloud_command if runtime == "charliecloud" else apptainer_command
    return program, compose(Launch(program, inside.image, command, mounts, workdir, env, own))


def mounts_of(image: str, mounts: Sequence[str], shared: Sequence[str]) -> list[list[str]]:
    """What to mount, in order: the user's mounts and the job's folders. Raises CannotStart."""
    if image.startswith("/") and not os.path.exists(image):
        raise CannotStart(f"container.image: {image} does not exist on this node")
    found = [mount.split(":") for mount in mounts]
    for source, *_ in found:
        if not os.path.exists(source):
            raise CannotStart(f"container.mounts: {source} does not exist on this node")
    for path in dict.fromkeys(shared):
        if not any(path == target for _, target, *_ in found) and os.path.isdir(path):
            found.append([path, path])
    return sorted(found, key=lambda mount: mount[1])  # what is mounted inside of another comes after it


def find_runtime(asked: str, takes: Sequence[str], path: str) -> tuple[str, str]:
    """The runtime, and its program on this node. Raises CannotStart."""
    for runtime in takes if asked == "auto" else [asked]:
        for name in PROGRAMS.get(runtime, ()):
            for folder in path.split(os.pathsep):
                if os.access(f"{folder}/{name}", os.X_OK):
                    return runtime, f"{folder}/{name}"
    wanted = [name for runtime in takes for name in PROGRAMS.get(runtime, ()) if asked in ("auto", runtime)]
    raise CannotStart(f"container.runtime: this node has no {' or '.join(wanted)} on its PATH ({path})")


def lend_package(runtime_folder: str) -> str:
    """Put the hook and `nvrx_slurm.workload` where every container sees them: into the agent's folder in memory."""
    lib = f"{runtime_folder}/lib"
    if not os.path.isdir(lib):
        import shutil

        fresh = f"{lib}.{os.getpid()}"
        shutil.copytree(_HOOK, f"{fresh}/hook", ignore=shutil.ignore_patterns("__pycache__"))
        for name in LENT:
            source, target = f"{_PACKAGE}/{name}", f"{fresh}/nvrx_slurm/{name}"
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if os.path.isdir(source):
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        try:
            os.rename(fresh, lib)
        except OSError:  # another rank was first
            shutil.rmtree(fresh, ignore_errors=True)
    return lib


def look_inside(image: str, program: str, mounts: Sequence[Sequence[str]], path: str) -> None:
    """Find the program in an image that is a folder: its runtime would say less. Raises CannotStart."""
    names = [program] if "/" in program else [f"{folder}/{program}" for folder in path.split(os.pathsep)]
    if "/" in program and not program.startswith("/"):
        return  # from the folder in which it starts
    for name in names:
        host = image + name
        for source, target, *_ in mounts:  # the innermost mount comes last
            if name.startswith(target.rstrip("/") + "/"):
                host = source + name[len(target.rstrip("/")) :]
        if os.path.lexists(host):  # a symbolic link may lead to what only the container sees
            return
    where = "" if "/" in program else f" on its PATH ({path})"
    raise CannotStart(f"container.image: {image} has no program {program}{where}")


# ------------------------------------------------------------------------------------------------ the command lines


def apptainer_command(launch: Launch) -> list[str]:
    """It passes the host's environment, its processes, network, /dev, /tmp and home by itself. `env` is added to."""
    env = launch.env
    prefix = "SINGULARITYENV_" if launch.program.endswith("singularity") else "APPTAINERENV_"
    env.update({prefix + name: env[name] for name in launch.own})  # over the image's own
    env[f"{prefix.removesuffix('ENV_')}_NO_EVAL"] = "1"  # `$HOME` in a value stays as it is
    env[prefix + "NVRX_BELOW_RUNTIME"] = "1"  # apptainer waits for the worker as its parent
    argv = [launch.program, "--quiet", "exec", "--pwd", launch.inside]
    argv += ["--nv"] if os.path.exists("/dev/nvidiactl") else ["--rocm"] if os.path.exists("/dev/kfd") else []
    argv += [word for mount in launch.mounts for word in ("--bind", ":".join(mount))]
    return [*argv, launch.image, *launch.command]


def has_overlay(program: str) -> bool:
    """Whether this ch-run can lay a file system in memory over an image, which then has any folder."""
    import subprocess  # where a mount point is missing

    said = subprocess.run([program, "--help"], stdin=subprocess.DEVNULL, capture_output=True, check=False).stdout
    return b"--write-fake" in said


def charliecloud_command(launch: Launch) -> list[str]:
    """It passes the host's environment, its processes, network, /dev and /tmp by itself. Raises CannotStart."""
    image = launch.image
    for source, target, *options in launch.mounts:
        if options == ["ro"]:
            raise CannotStart(f"container.mounts: ch-run mounts nothing read-only: {source}:{target}:ro")
    # Each mount needs something to be mounted on, and the image is mounted read-only.
    missing = [mount for mount in launch.mounts if not os.path.lexists(image + mount[1])]
    overlay = ["--write-fake"] if missing and has_overlay(launch.program) else []
    if not overlay and os.path.isdir(image):
        for source, target, *_ in missing:
            try:
                if os.path.isdir(source):
                    os.makedirs(image + target, exist_ok=True)
                else:
                    os.makedirs(os.path.dirname(image + target), exist_ok=True)
                    os.close(os.open(image + target, os.O_CREAT | os.O_CLOEXEC, 0o644))
            except OSError as error:
                raise CannotStart(
                    f"container.image: {image} has nothing at {target} to mount on, and none can be made there"
                    f" ({error.strerror}): `mkdir -p {image}{target}`"
                ) from None
    argv = [
        launch.program,
        *overlay,
        *(f"--unset-env={name}" for name in HOST_ONLY if name not in launch.own),
        f"--set-env=PATH={PATH_INSIDE}",
    ]
    if os.path.exists(f"{image}/ch/environment"):
        argv.append("--set-env")
    argv.append("--env-no-expand")
    # One pair of quotes is taken off; what comes later wins over the image's own.
    argv += [f"--set-env={name}='{launch.env[name]}'" for name in launch.own]
    argv += [f"--bind={source}:{target}" for source, target, *_ in launch.mounts]
    return [*argv, f"--cd={launch.inside}", image, "--", *launch.command]
