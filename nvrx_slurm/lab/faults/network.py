"""Nodes with a network of their own, which can be cut, slowed and lied to. It needs no root.

`network_switch.py` says how. Everything else is shared: processes, files, the monotonic clock.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from nvrx_slurm.errors import NvrxError

HERE = Path(__file__).parent
# The host that is no node: the batch host runs there.
BATCH = "batch"

NO_NAMESPACES = (
    "no network of our own: it needs `ip` (iproute2), and a kernel that lets us have user namespaces: a container's"
    " seccomp profile may forbid them, and Ubuntu does unless"
    " `sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
)

# How long the switch may take to build the network, and to answer an order.
ANSWERS_WITHIN_S = 30.0

# Host → by how many seconds its frames are late, and which share of them is lost.
Slowness = Mapping[str, tuple[float, float]]


class HostNetwork:
    """Namespaces for the batch host and for each node, and the switch between them, which goes with this process.

    `door`: a port of which each host gets a listener on its loopback; they are `doors`, in the order BATCH, nodes.
    Raises NvrxError where there can be no such network.
    """

    def __init__(self, nodes: Sequence[str], *, door: int = 0) -> None:
        self.nodes = tuple(nodes)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(ANSWERS_WITHIN_S)
        with theirs:
            self._switch = subprocess.Popen(
                [
                    *("unshare", "--user", "--map-root-user", "--net", sys.executable, "-S"),
                    *(str(HERE / "network_switch.py"), str(theirs.fileno()), str(door), BATCH, *nodes),
                ],
                pass_fds=[theirs.fileno()],
            )
        data, doors = b"", list[int]()
        with contextlib.suppress(TimeoutError):
            data, doors, _, _ = socket.recv_fds(self._control, 65536, 1 + len(nodes))
        # The switch hangs, or has ended before it could report: then `unshare` or `ip` said why on stderr.
        if not data:
            self.close()
            raise NvrxError(NO_NAMESPACES)
        self.pid, self.namespaces = (json.loads(data)[key] for key in ("pid", "namespaces"))
        self.doors = [socket.socket(fileno=door) for door in doors]

    def close(self) -> None:
        """End the switch, and with it the network; what still runs in it receives nothing."""
        self._control.close()
        self._switch.kill()  # one that hangs would not see that its control socket was closed
        self._switch.wait()

    # ---- faults

    def cut(self, hosts: Collection[str]) -> list[str]:
        """These hosts' frames are lost from now on, in silence; no other host's are. Returns who is cut off."""
        return list(self._ask(cut=list(hosts)))

    def slow(self, hosts: Slowness) -> dict[str, list[float]]:
        """These hosts' frames are late, or lost by chance; no other host's are. Returns who is slowed, and how."""
        return dict(self._ask(slow=hosts))

    def rule(self, *rules: dict[str, Any]) -> None:
        """What of the rest is lost or refused: `network_switch.SwitchRule`."""
        self._ask(rules=rules)

    def heal(self) -> None:
        """All frames pass, all at once."""
        self._ask(cut=(), rules=(), slow={})

    def reset(self, rule: dict[str, Any]) -> int:
        """Break TCP connections as a third party does, at both ends; returns how many there were."""
        return int(self._ask(reset=rule))

    def _ask(self, **orders: Any) -> Any:
        try:
            self._control.send(json.dumps(orders).encode())
            return json.loads(self._control.recv(65536))
        except (OSError, ValueError) as error:
            raise NvrxError(f"the switch of the network does not answer: {error}") from None

    # ---- processes

    def inside(self, host: str) -> list[str]:
        """What to write before a command that shall run on that host."""
        process = f"/proc/{self.pid}"
        net = f"--net={process}/fd/{self.namespaces[host]}"
        # Else nsenter drops the user's groups (nsenter(1)), which `unshare --map-root-user` forbids in its namespace.
        return ["nsenter", "--preserve-credentials", f"--user={process}/ns/user", net]

    def agents(self) -> list[str]:
        """The command, for a process inside, that starts one agent a node, each on its own host."""
        places = [f"{node}={self.namespaces[node]}" for node in self.nodes]
        return ["sh", str(HERE / "network_agents.sh"), sys.executable, str(self.pid), *places]
