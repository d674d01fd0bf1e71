"""The attribution service that a job has for itself (`manage_attrsvc`): started by the batch host, and ended with it.

Its address and token are in `attrsvc.json` in the job folder (0600) while it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from pathlib import Path

import msgspec

from nvrx_slurm.batch.children import send_signal
from nvrx_slurm.errors import UnsafePath
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.folder import LOOPBACK, JobFolder
from nvrx_slurm.util.files import open_log
from nvrx_slurm.util.ids import new_secret
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import dies_with_parent

log = get_logger("batch")

READ_BYTES = 64 << 10

PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Before it is started again. A job without its service goes on: it restarts without a verdict."""


class ManagedService:
    """Keeps one service going; `process` is the one that runs."""

    def __init__(self, plan: Plan, folder: JobFolder, env: Mapping[str, str]) -> None:
        self._plan, self._folder, self._env = plan, folder, env
        self._token = new_secret()
        self.process: Process | None = None

    async def keep(self) -> None:
        """Start it, again and again, until cancelled. Whatever it does, and a full disk, costs the job nothing but
        its verdicts."""
        for attempt in range(sys.maxsize):
            try:
                await self._run_once()
            except (OSError, ValueError, UnsafePath) as error:
                log.error("the attribution service: %s", error)
                await self._end()
            pause_s = PAUSES_S[min(attempt, len(PAUSES_S) - 1)]
            log.warning("the attribution service ended; starting it again in %g s", pause_s)
            await asyncio.sleep(pause_s)

    def clear_away(self) -> None:
        """Its address and its secret; what it found out stays."""
        for path in (self._folder.service_path, self._token_path, self._port_path):
            with contextlib.suppress(OSError, UnsafePath):  # the job ends all the same
                self._folder.remove(path.name)

    async def _run_once(self) -> None:
        for path in (self._folder.service_path, self._port_path):  # of one that ran here before, with another token
            self._folder.remove(path.name)
        self._folder.write(self._token_path.name, self._token.encode())
        with os.fdopen(open_log(self._folder.node_log("attrsvc")), "ab") as errors:
            self.process = await asyncio.create_subprocess_exec(
                *self._argv(),
                env=dict(self._env),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=errors,
                start_new_session=True,
                preexec_fn=dies_with_parent(signal.SIGKILL),
            )
        assert self.process.stdout is not None
        if await self.process.stdout.readline():  # it says so when it listens
            url = f"http://{LOOPBACK}:{self._folder.read(self._port_path.name).decode().strip()}"
            self._folder.write(
                self._folder.service_path.name, msgspec.json.encode({"url": url, "token": self._token})
            )
        while await self.process.stdout.read(READ_BYTES):
            pass
        await self.process.wait()
        self._folder.remove(self._folder.service_path.name)

    async def _end(self) -> None:
        """It is of no use: nobody knows where it listens."""
        if self.process is not None and self.process.returncode is None:
            send_signal(self.process, signal.SIGKILL)
            await self.process.wait()

    def _argv(self) -> list[str]:
        argv = [sys.executable, "-P", "-m", "nvrx_slurm", "attrsvc", "--managed", "--bind", f"{LOOPBACK}:0"]
        argv += ["--workers", "1", "--root", str(self._folder.path)]
        argv += ["--state-dir", str(self._folder.path / "attrsvc")]
        argv += ["--token-file", str(self._token_path), "--port-file", str(self._port_path)]
        for rules in self._plan.fault_tolerance.attribution.rules:
            argv += ["--rules", rules]
        return argv

    @property
    def _token_path(self) -> Path:
        return self._folder.path / "attrsvc.token"

    @property
    def _port_path(self) -> Path:
        return self._folder.path / "attrsvc.port"
