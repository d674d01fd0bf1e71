"""An attempt's process, as the run that started it sees it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import DEVNULL, Process

from nvrx_slurm.batch.children import send_signal
from nvrx_slurm.errors import EXIT_FAILED
from nvrx_slurm.jobspec import env
from nvrx_slurm.lab.flow.running.artifacts import AttemptFolder
from nvrx_slurm.lab.flow.running.hold import MARK
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.durations import words

STACKS_S = 1.0
"""How long a process that hangs may take to write down its stacks."""


class Launched:
    """One attempt's process. `why_untold`: why it may not have told how it went, once it has ended."""

    def __init__(self, folder: AttemptFolder, process: Process, clock: Clock) -> None:
        self.folder, self._process, self._clock = folder, process, clock
        self.began_at, self._began = clock.wall(), clock.monotonic()
        self._exceeded: str | None = None

    @classmethod
    async def start(cls, folder: AttemptFolder, clock: Clock) -> Launched:
        """In a session of its own: Ctrl-C is for the run, which tells its attempts."""
        with folder.log_path.open("ab") as log_file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "nvrx_slurm.lab.flow.running.attempt", str(folder.path)),
                env=env.child_environment({MARK: str(folder.path)}, with_secrets=True),
                stdin=DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
            )
        return cls(folder, process, clock)

    @property
    def took_s(self) -> float:
        return self._clock.monotonic() - self._began

    @property
    def exit_code(self) -> int:
        """Of a process that has ended, and not well."""
        return max(self._process.returncode or 0, EXIT_FAILED)

    @property
    def why_untold(self) -> str:
        if self._exceeded:
            return self._exceeded
        code = self._process.returncode or 0
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"the attempt's process {end} before it could tell how it went"

    async def ended(self, bound_s: float, patience_s: float) -> None:
        """Wait for its end. One that hangs is told to write down its stacks, then to end, and then is killed."""
        for wait_s, then in ((bound_s, signal.SIGUSR1), (STACKS_S, signal.SIGTERM), (patience_s, signal.SIGKILL)):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._process.wait()), wait_s)
                return
            self._exceeded = f"the attempt did not end within {words(bound_s)}, clean-up included"
            self.tell(then)
        await self._process.wait()

    def tell(self, number: signal.Signals) -> None:
        send_signal(self._process, number)
