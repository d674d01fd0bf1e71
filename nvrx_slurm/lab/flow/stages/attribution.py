"""A scripted attribution service beside a job: a real server that answers as the flow says, and can be struck."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from nvrx_slurm.errors import FaultFailed, NvrxError
from nvrx_slurm.lab.devcluster.waiting import wait_until
from nvrx_slurm.lab.flow.stages.base import Hit, Scene
from nvrx_slurm.lab.flow.stages.strikes import Strike
from nvrx_slurm.lab.flow.stages.targets import Arguments
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.processes import dies_with_parent, stat_fields

PROVEN_WITHIN_S = 5.0
SIGNALS = {
    "kill": (signal.SIGKILL, "ZX-"),
    "stop": (signal.SIGSTOP, "T"),
    "continue": (signal.SIGCONT, "SRD"),
}
"""What is done to it → the signal, and the states of a process (proc(5)) that prove it; `-`: it is no more."""


class AttributionService:
    """`python -m nvrx_slurm.lab.faults.attribution_server`; it dies with this process."""

    def __init__(self, behaviour: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "nvrx_slurm.lab.faults.attribution_server", "--behaviour", behaviour],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=dies_with_parent(signal.SIGKILL),
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if not said:
            self.close()
            raise NvrxError(f"the scripted attribution service did not start ({behaviour})")
        self.url = said.split()[-1]

    @property
    def pid(self) -> int:
        return self._process.pid

    def strikes(self, clock: Clock) -> dict[str, Strike]:
        """`kill_attribution_service` and its like, proven by /proc."""
        return {f"{act}_attribution_service": self._strike(act, clock) for act in SIGNALS}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _strike(self, act: str, clock: Clock) -> Strike:
        number, states = SIGNALS[act]

        def strike(arguments: Arguments, scene: Scene) -> Hit:
            if self._state() in "ZX-":
                raise FaultFailed("the attribution service is dead already")
            at = clock.wall()
            os.kill(self.pid, number)
            what = f"the attribution service to be in state {' or '.join(states)} after {number.name}"
            wait_until(lambda: self._state() in states, timeout_s=PROVEN_WITHIN_S, what=what, clock=clock)
            return Hit(at=at, proof=f"process {self.pid} is in state {self._state()}")

        return strike

    def _state(self) -> str:
        fields = stat_fields(self.pid)
        return "-" if fields is None else fields[0]
