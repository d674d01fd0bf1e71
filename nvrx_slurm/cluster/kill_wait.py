"""KillWait: how long a job that is cancelled or preempted has, between SIGTERM and SIGKILL (slurm.conf(5)).

The question is put while something else runs, and is worth no trouble: after any error the answer is None.
"""

from __future__ import annotations

import contextlib
import subprocess
from typing import Self

from nvrx_slurm.cluster.commands import child_environment_for, is_set_up
from nvrx_slurm.cluster.slurm_text import kill_wait_of

_REAPED_S = 1.0


class KillWaitQuestion:
    """Asked on entry, answered by `answer`; what runs at the exit is killed."""

    def __enter__(self) -> Self:
        self._process = _start()
        return self

    def answer(self, *, timeout_s: float) -> float | None:
        """The cluster's KillWait in seconds, or None where it is not known within `timeout_s`."""
        if self._process is None:
            return None
        try:
            stdout, _ = self._process.communicate(timeout=timeout_s)
        except (subprocess.TimeoutExpired, OSError, ValueError):
            return None
        return kill_wait_of(stdout)

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.kill()
        if self._process.stdout:
            self._process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: SIGKILL ends that some day
            self._process.wait(_REAPED_S)


def _start() -> subprocess.Popen[str] | None:
    environment = child_environment_for("scontrol")
    if not is_set_up(environment):
        return None
    try:
        return subprocess.Popen(
            ("scontrol", "show", "config"),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
        )
    except OSError:
        return None
