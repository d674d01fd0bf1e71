"""What `scontrol show config` says: the cluster's name, and KillWait (slurm.conf(5))."""

from __future__ import annotations

import contextlib
import subprocess
from typing import Self

from nvrx_slurm.cluster.commands import Runner, SystemRunner, child_environment_for, is_set_up
from nvrx_slurm.cluster.slurm_text import number_of, settings_of
from nvrx_slurm.jobspec import env

NAME_ANSWER_S = 10.0
_REAPED_S = 1.0


def named_cluster(run: Runner | None = None) -> str | None:
    """The cluster's name, as its jobs know it from SLURM_CLUSTER_NAME; None where no Slurm answers."""
    if name := env.slurm_cluster_name():
        return name
    try:
        output = (run or SystemRunner())(["scontrol", "show", "config"], timeout_s=NAME_ANSWER_S)
    except FileNotFoundError:
        return None
    return settings_of(output.stdout).get("ClusterName") if output.ok else None


class KillWaitQuestion:
    """How long a job that is cancelled or preempted has, between SIGTERM and SIGKILL.

    Asked on entry, so that something else can run meanwhile, and answered by `answer`; what runs at the exit is
    killed. After any error the answer is None: it is worth no trouble.
    """

    def __enter__(self) -> Self:
        self._process: subprocess.Popen[str] | None = None
        environment = child_environment_for("scontrol")
        if is_set_up(environment):
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(
                    ("scontrol", "show", "config"),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    encoding="utf-8",
                    errors="replace",
                )
        return self

    def answer(self, *, timeout_s: float) -> float | None:
        """The cluster's KillWait in seconds, or None where it is not known within `timeout_s`."""
        if self._process is None:
            return None
        try:
            stdout, _ = self._process.communicate(timeout=timeout_s)
        except (subprocess.TimeoutExpired, OSError, ValueError):
            return None
        return number_of(settings_of(stdout), "KillWait")

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        # Nothing waits for the answer any more. A site's scontrol may hang for MessageTimeout.
        self._process.kill()
        if self._process.stdout:
            self._process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: SIGKILL ends that some day
            self._process.wait(_REAPED_S)
