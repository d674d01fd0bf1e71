"""Child processes that do not outlive the batch host; the attribution service (`manage_attrsvc`) is one.

The service's address and token are in `attrsvc.json` in the job folder (0600) while it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Collection, Mapping, Sequence

import msgspec

from nvrx_slurm.errors import UnsafePath
from nvrx_slurm.jobspec.plan import Plan
from nvrx_slurm.journal.folder import LOOPBACK, JobFolder
from nvrx_slurm.util.files import open_log
from nvrx_slurm.util.ids import new_secret
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import dies_with_parent, restore_descriptor_limit, send_signal

log = get_logger("batch")

RESTART_PAUSES_S = (0.0, 0.1, 0.2, 0.5, 1.0)

SAY_EVERY_S = 1.0
# How long a child may linger after SIGKILL: it is in uninterruptible sleep (D).
KILL_S = 5.0


def restart_pause_s(failures: int) -> float:
    """How long to wait before the controller or the store is started again, after so many failures in a row."""
    return RESTART_PAUSES_S[min(failures, len(RESTART_PAUSES_S) - 1)]


async def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    on_death: signal.Signals,
    pending: Collection[signal.Signals] = (),
    pass_fds: Collection[int] = (),
) -> Process:
    """Start a child in its own session, which inherits this process's output. Signals of `pending` wait until the
    child unblocks them."""
    adopt = dies_with_parent(on_death)

    def prepare() -> None:
        adopt()
        restore_descriptor_limit()
        # One that is sent before the child can handle it is not lost, and does not kill it.
        signal.pthread_sigmask(signal.SIG_BLOCK, pending)

    return await asyncio.create_subprocess_exec(
        *argv,
        env=dict(env),
        stdin=DEVNULL,
        pass_fds=tuple(pass_fds),
        start_new_session=True,
        preexec_fn=prepare,
    )


async def ended(children: Mapping[str, Process], *, within_s: float) -> bool:
    """Wait until all of these (name → child) have ended, `within_s` at most; log once a second which have not."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while left := [name for name, child in children.items() if child.returncode is None]:
        left_s = deadline - loop.time()
        if left_s <= 0.0:
            return False
        ends = [asyncio.ensure_future(children[name].wait()) for name in left]
        await asyncio.wait(ends, timeout=min(SAY_EVERY_S, left_s))
        if still := [name for name, end in zip(left, ends, strict=True) if not end.done()]:
            log.info("waiting for %s to end, for up to %.0f s", ", ".join(still), max(0.0, deadline - loop.time()))
    return True


async def end(children: Mapping[str, Process], *, polite_s: float) -> None:
    """SIGTERM, up to `polite_s` for them to end, then SIGKILL."""
    for number, wait_s in ((signal.SIGTERM, polite_s), (signal.SIGKILL, KILL_S)):
        for child in children.values():
            send_signal(child, number)
        await ended(children, within_s=wait_s)


READ_BYTES = 64 << 10

# Before it is started again. A job without its service goes on: it restarts without a verdict.
PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class ManagedService:
    """Keeps one service going; `process` is the one that runs."""

    def __init__(self, plan: Plan, folder: JobFolder, env: Mapping[str, str]) -> None:
        self._plan, self._folder, self._env = plan, folder, env
        self._token = new_secret()
        self._token_path, self._port_path = folder.path / "attrsvc.token", folder.path / "attrsvc.port"
        self.process: Process | None = None

    async def keep(self) -> None:
        """Start it, again and again, until cancelled."""
        # Without a bound: any end of it, and a full disk, costs the job nothing but its verdicts.
        for attempt in range(sys.maxsize):
            try:
                await self._run_once()
            except (OSError, RuntimeError, ValueError, UnsafePath) as error:
                log.error("the attribution service: %s", error)
                await self._end()  # its address is not in the job folder: no client would find it
            pause_s = PAUSES_S[min(attempt, len(PAUSES_S) - 1)]
            log.warning("the attribution service ended; starting it again in %g s", pause_s)
            await asyncio.sleep(pause_s)

    def clear_away(self) -> None:
        """Remove its address and its secret; its findings stay."""
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
        if await self.process.stdout.readline():  # it prints a line once it listens
            url = f"http://{LOOPBACK}:{self._folder.read(self._port_path.name).decode().strip()}"
            self._folder.write(
                self._folder.service_path.name, msgspec.json.encode({"url": url, "token": self._token})
            )
        # To the end, and dropped: a pipe that is full would stop the service.
        while await self.process.stdout.read(READ_BYTES):
            pass
        await self.process.wait()
        self._folder.remove(self._folder.service_path.name)

    async def _end(self) -> None:
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
