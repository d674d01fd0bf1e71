"""The death of a local node, with real signals."""

from __future__ import annotations

import signal

from nvrx_slurm.agent.supervisor import descendants, send_all


def kill_local_node(agent_pid: int) -> None:
    """A local node dies: SIGKILL to its agent, its supervisor, its workers and all that they started.

    All are stopped first, and children die before their parents, so that none sees another die: as close to a power
    cut as processes come.
    """
    processes = [agent_pid, *descendants(agent_pid)]  # parents first
    send_all(processes, signal.SIGSTOP)
    send_all(processes[::-1], signal.SIGKILL)
