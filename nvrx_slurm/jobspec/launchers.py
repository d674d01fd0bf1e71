"""What torchrun's and ft_launcher's command lines mean here, so that a line of an existing script stays as it is.

Both start an agent on each node, find each other by a rendezvous, and restart workers. That is this tool's own work:
of their flags remain how many nodes, workers and restarts; how the rendezvous is found is ignored with a word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

from nvrx_slurm.errors import UsageError

PROGRAMS = {"torchrun", "ft_launcher"}
MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "nvidia_resiliency_ext.fault_tolerance.launcher": "ft_launcher",
}
STEP_STARTERS = ("srun", "mpirun", "mpiexec")

_SHORT = {"-m": "--module", "-r": "--redirects", "-t": "--tee"}
_SWITCHES = {"--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank", "--use-env"}
_COUNTED = {"--nnodes", "--nproc-per-node", "--max-restarts"}
_IGNORED = {
    "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--node-rank", "--master-addr", "--master-port",
    "--local-addr", "--monitor-interval", "--start-method", "--event-log-handler", "--role", "--log-dir",
    "--redirects", "--tee", "--local-ranks-filter", "--duplicate-stdout-filters", "--duplicate-stderr-filters",
    "--logs-specs", "--numa-binding", "--signals-to-handle", "--shutdown-timeout",
    # of ft_launcher
    "--fault-tol-cfg-path", "--restart-policy", "--ignore-missing-fault-tol-cfg",
}  # fmt: skip
# Those that are understood among this tool's own flags, too.
_HERE = _COUNTED | {"--standalone"} | {
    name for name in _IGNORED if name.startswith(("--rdzv", "--node-rank", "--master"))
}  # fmt: skip

_RANGE = re.compile(r"(\d+)(?::(\d+))?")


class Translation(NamedTuple):
    """`flags`: this tool's own, for those that counted; `rest`: the words that are left; `ignored`: flags that mean
    nothing here."""

    flags: tuple[str, ...]
    rest: tuple[str, ...]
    ignored: tuple[str, ...]


def launcher_in(command: Sequence[str]) -> tuple[str, int] | None:
    """The launcher that the command starts with, and how many words name it; None: it is the user's own program.

    Raises UsageError where srun starts the launcher: each worker would start the whole job again.
    """
    words = [PurePath(word).name for word in command]
    if words[0] in PROGRAMS:
        return words[0], 1
    # As in `python -u -m`. Further to the right `-m` is a word of the user's own script.
    if words[0].startswith("python") and "-m" in words[1:3]:
        at = words.index("-m") + 1
        if at < len(words) and words[at] in MODULES:
            return MODULES[words[at]], at + 1
    if words[0] in STEP_STARTERS and (found := PROGRAMS & set(words)):
        program = min(found)
        raise UsageError(
            f"nvrx-slurm starts the workers on all nodes by itself: leave {words[0]} and its flags out, and write the"
            f" command from {program} on"
        )
    return None


def unwrapped(command: Sequence[str], *, allocated: int | None, gpus: str | None) -> tuple[str, Translation] | None:
    """The launcher's name and what its command line means; `rest` is the command that each worker runs. None: the
    command starts no launcher.

    `allocated`: the nodes of the allocation that the command is called in. `gpus`: those of a node, if the line or
    Slurm has said how many. Raises UsageError.
    """
    found = launcher_in(command)
    if found is None:
        return None
    name, count = found
    words = list(command[count:])
    flags: list[str] = []
    ignored: list[str] = []
    switches: set[str] = set()
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            break
        flag, equals, value = word.partition("=")
        flag = _SHORT.get(flag, flag)
        if not flag.startswith("--") and flag[:2] in _SHORT and not equals:  # -r3
            flag, equals, value = _SHORT[flag[:2]], "=", flag[2:]
        # torchrun takes both spellings of its flags, and older scripts have `--nproc_per_node`.
        flag = flag.replace("_", "-")
        # The last one takes no value either, unlike the others that are ignored.
        if flag in _SWITCHES or flag == "--ignore-missing-fault-tol-cfg":
            switches.add(flag)
            continue
        # Not passed over: whether the next word is its value, or the script, only its meaning says.
        if flag not in _COUNTED | _IGNORED and not flag.startswith("--ft-"):
            raise UsageError(
                f"{flag} of {name} has no meaning here that is known: leave it out, or write the command without"
                f" {name}, `python SCRIPT …`"
            )
        if not equals:
            if not words:
                raise UsageError(f"{flag} of {name} needs a value")
            value = words.pop(0)
        own = _counted(flag, value, allocated, gpus)
        flags += own
        if not own:
            ignored.append(flag)
    if not words:
        raise UsageError(f"the command of {name} names no script")
    # torchrun starts its script by the Python that it runs on, unbuffered.
    if "--no-python" not in switches:
        python = command[0] if count > 1 else str(PurePath(command[0]).with_name("python"))
        words = [python, "-u", *(["-m"] if "--module" in switches else []), *words]
    ignored += sorted(switches & {"--standalone", "--run-path", "--virtual-local-rank"})
    return name, Translation(tuple(flags), tuple(words), tuple(ignored))


def own_flags(arguments: Sequence[str], *, allocated: int | None, gpus: str | None) -> Translation:
    """The same for flags of torchrun among this tool's own; `rest` is what is not torchrun's. Raises UsageError."""
    flags: list[str] = []
    rest: list[str] = []
    ignored: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if flag not in _HERE:
            rest.append(word)
            continue
        if flag not in _SWITCHES and not equals:
            if not words:
                raise UsageError(f"{flag} needs a value")
            value = words.pop(0)
        own = [] if flag in _SWITCHES else _counted(flag, value, allocated, gpus)
        flags += own
        if not own:
            ignored.append(flag)
    return Translation(tuple(flags), tuple(rest), tuple(ignored))


def _counted(flag: str, value: str, allocated: int | None, gpus: str | None) -> list[str]:
    """This tool's flags for one of `_COUNTED`; none where it changes nothing here."""
    if flag == "--nnodes":
        found = _RANGE.fullmatch(value)
        if found is None:
            raise UsageError(f"--nnodes {value}: write a number of nodes, or MIN:MAX")
        least, most = int(found[1]), int(found[2] or found[1])
        # srun starts torchrun on all nodes; here some of them are spares.
        nodes = [] if most == allocated else ["--nodes", str(most)]
        return nodes + (["--set", f"min_nodes={least}"] if least < most else [])
    if flag == "--nproc-per-node":
        if value in ("gpu", "auto") and gpus and gpus.isdecimal():
            value = gpus
        if not value.isdecimal():
            also = ", or give --gpus-per-node in front of `--`" if value in ("gpu", "auto") else ""
            raise UsageError(f"--nproc-per-node {value}: say how many, as `--workers-per-node 8`{also}")
        return ["--workers-per-node", value]
    if flag == "--max-restarts":
        return ["--set", f"fault_tolerance.max_restarts={value}"]
    return []
