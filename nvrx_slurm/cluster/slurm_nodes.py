"""What Slurm says of nodes, for the journal of a loss; and whether that proves that our processes are dead there.

Only a reboot does. All else that Slurm may say is hearsay. A node is DOWN because slurmd has not answered, which a
partition of the network brings about as well, or because an administrator set it; its processes live on until a
slurmd that can be reached is ordered to kill them. POWERED_DOWN means that SuspendTimeout has passed since
SuspendProgram was started: Slurm looks neither at that program's exit code nor at the machine (slurm.conf(5)). FAIL
and DRAIN announce the future.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

import msgspec
from msgspec.structs import replace

from nvrx_slurm.cluster.commands import child_environment_for, is_set_up
from nvrx_slurm.cluster.slurm_text import number_of, settings_of
from nvrx_slurm.util.tasks import run_program

ANSWER_S = 5.0
# How far the clocks of two nodes may be apart: munge's credentials live so long, and without them no Slurm works.
CLOCK_SKEW_S = 300.0

_NAME = re.compile(r"NodeName=(\S+)")
# With the blank in front: `NextState=`, of a node that is to boot, ends with the same word.
_STATE = re.compile(r" State=(\S+)")
# A reason is a whole sentence, and not always the last field of its line: hence up to what is known to follow.
_REASON = re.compile(r" Reason=(.*?)(?: \[[^\s@\]]+@\S+\])?(?:\s+(?:Comment|Extra)=.*)?$")
_BOOT_TIME = re.compile(r" BootTime=(\S+)")
_ADDR, _PORT = re.compile(r" NodeAddr=(\S+)"), re.compile(r" Port=(\d+)")
_OUT_OF_USE = {"DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILED", "FAILING", "NOT_RESPONDING", "POWERED_DOWN"}
SLURMD_PORT = 6818  # Slurm's default
SLURMD_ANSWERS_S = 3.0
# Times as Slurm prints them carry no zone: it is that of the program which prints them.
IN_UTC = {"TZ": "UTC0", "SLURM_TIME_FORMAT": "standard"}


class SlurmNode(msgspec.Struct, frozen=True):
    """One node. `state` is Slurm's text, such as `DOWN+NOT_RESPONDING`; `booted_at` is seconds since the epoch;
    `addr` and `port`: where its slurmd listens (port None: where those of most nodes do)."""

    name: str
    state: str
    reason: str | None = None
    booted_at: float | None = None
    addr: str = ""
    port: int | None = None

    @property
    def takes_steps(self) -> bool:
        """Whether the node is well in Slurm's eyes: no health check of the site's, and no administrator, has taken it
        out of use."""
        return not _OUT_OF_USE.intersection(re.split(r"[+*]", self.state))

    def proves_dead(self, *, heard_at: float) -> bool:
        """Whether nothing that ran on the node at `heard_at` can still run: it has booted since.

        `heard_at`, in seconds since the epoch, is when the lost agent was heard of, its joining at the earliest; the
        job's start would not do: Slurm may start a job while some of its nodes still boot.
        """
        return self.booted_at is not None and self.booted_at > heard_at + CLOCK_SKEW_S


async def node_state(node: str) -> SlurmNode | None:
    """What Slurm says of one node; None where it cannot be asked, or knows no such node. See `node_states`."""
    return (await node_states([node])).get(node)


async def node_states(nodes: Sequence[str], *, timeout_s: float = ANSWER_S) -> dict[str, SlurmNode]:
    """What Slurm says of these nodes, asked for in one call. Those that it says nothing of are left out.

    Takes `timeout_s` at most, and never raises: who asks has lost a node, and must go on without an answer.
    """
    if not nodes:  # scontrol would list all of them
        return {}
    query = ("scontrol", "--oneliner", "show", "node", ",".join(nodes))
    answer = await said(*query, extra=IN_UTC, timeout_s=timeout_s)
    return {node.name: node for node in nodes_of(answer) if node.name in nodes}


class JobNodes:
    """What Slurm and the nodes' own slurmds say of one job's nodes."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self._port: int | None = None

    async def allocated(self) -> tuple[str, ...] | None:
        """The nodes that the job holds now; None where Slurm does not answer. A node that Slurm has given up is not
        among them, whether it is back or not."""
        listed = await said("squeue", "--noheader", "--format=%N", f"--jobs={self.job_id}")
        if not listed.strip():
            return None
        unfolded = await said("scontrol", "show", "hostnames", listed.strip())
        return tuple(unfolded.split()) or None  # a program that failed has said nothing

    async def nodes(self, names: Sequence[str]) -> dict[str, SlurmNode]:
        """See `node_states`."""
        found = await node_states(names)
        # Slurm names the port of a node only where it differs from that of most nodes.
        if self._port is None and any(node.port is None for node in found.values()):
            self._port = int(number_of(await slurm_settings(), "SlurmdPort") or SLURMD_PORT)
        return {name: replace(node, port=node.port or self._port) for name, node in found.items()}

    async def answers(self, node: SlurmNode) -> bool:
        """Whether a slurmd that works listens on the node. It costs slurmctld nothing, slurmd a line in its log."""
        try:
            async with asyncio.timeout(SLURMD_ANSWERS_S):
                reader, writer = await asyncio.open_connection(node.addr, node.port or SLURMD_PORT)
                try:
                    # The kernel connects for a frozen slurmd too. One that works closes when it reads the end of the
                    # stream.
                    writer.write_eof()
                    await reader.read()
                finally:
                    writer.transport.abort()
        except ConnectionResetError:
            return True  # a slurmd may close with a reset, too
        except OSError:  # a TimeoutError too
            return False
        return True


async def slurm_settings() -> dict[str, str]:
    """The settings of slurm.conf(5); none where Slurm does not answer."""
    return settings_of(await said("scontrol", "show", "config"))


def nodes_of(stdout: str) -> Iterator[SlurmNode]:
    """The nodes of `scontrol --oneliner show node`, printed with `TZ=UTC0`."""
    for line in stdout.splitlines():
        name, state = _NAME.match(line), _STATE.search(line)
        if name and state:
            reason = _REASON.search(line)
            addr, port = _ADDR.search(line), _PORT.search(line)
            booted_at = None
            with contextlib.suppress(ValueError):  # `None`, of a node that has never registered
                if found := _BOOT_TIME.search(line):
                    booted_at = datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp()
            yield SlurmNode(
                name[1],
                state[1],
                reason[1] if reason else None,
                booted_at,
                addr[1] if addr else name[1],
                int(port[1]) if port else None,
            )


async def said(
    *command: str, timeout_s: float = ANSWER_S, extra: Mapping[str, str] | None = None, folder: str | None = None
) -> str:
    """What a program of Slurm's prints; nothing where no Slurm is set up, it cannot run, or takes too long. `extra`:
    variables for it; `folder`: where it runs."""
    environment = child_environment_for(command[0], extra)
    if not is_set_up(environment):
        return ""
    try:
        _, printed = await run_program(command, env=environment, folder=folder, timeout_s=timeout_s)
    except OSError:  # a TimeoutError too
        return ""
    return printed.decode(errors="replace")
