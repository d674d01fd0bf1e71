"""The warm processes of this node's roles: which there are, what they import, when they are made again.

The supervisor keeps the processes (`warm.py`); here is decided what becomes of them. A warm process is a gain and
never a condition: whatever goes wrong with it, the workers of its role start cold, and the journal says why.

    probing ──▶ warming ──▶ ready ──▶ ended (died, out of date) ──▶ warming …
       └───────────┴──▶ off, with the reason
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from nvrx_slurm.agent.machine import StacksPort, WorkersPort
from nvrx_slurm.agent.reporting import FactPublisher
from nvrx_slurm.agent.starting import RANK_VARIABLES, role_environment
from nvrx_slurm.agent.workers import WarmSaid
from nvrx_slurm.jobspec import env as environment
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.jobspec.prewarm import PrewarmSpec, probe_command, why_cold
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import Prewarmed, PrewarmFailed
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.durations import words
from nvrx_slurm.util.log import get_logger

log = get_logger("agent")

PROBE = "nvrx-warm"
"""What the start-up hook prints when it is asked whether it is there."""

PROBE_S = 60.0
MOST_REFUSALS = 8
MOST_ENDS = 5

State = Literal["probing", "warming", "ready", "ended", "off"]


@dataclass(slots=True)
class RoleWarmth:
    """A role and its warm process. `skipped`: module → why it is not imported there; `until`: how long workers wait
    for it; `settled`: it does not warm up now."""

    role: RolePlan
    spec: PrewarmSpec
    state: State = "probing"
    why: str | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    began: float = 0.0
    until: float = 0.0
    attempt: int = 0
    refusals: int = 0
    ends: int = 0
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class Prewarming:
    """Of one node. `go`: runs a task beside the agent's loop."""

    def __init__(
        self,
        plan: Plan,
        *,
        folder: JobFolder,
        node: str,
        workers: WorkersPort,
        stacks: StacksPort,
        publisher: FactPublisher,
        clock: Clock,
        go: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._plan, self._folder, self._node = plan, folder, node
        self._workers, self._stacks, self._publisher = workers, stacks, publisher
        self._clock, self._go = clock, go
        self._roles = {role.name: RoleWarmth(role, role.prewarm) for role in plan.roles if role.prewarm is not None}
        self._said: set[tuple[str, str]] = set()
        self._is_starting = False

    def begin(self) -> None:
        """Make a warm process for each role that asks for one: this node does not know yet which it will have."""
        for warmth in self._roles.values():
            warmth.began = self._clock.monotonic()
            warmth.until = warmth.began + warmth.spec.timeout
            self._go(self._probe(warmth))

    def keep_only(self, role: str) -> None:
        """The node works for this role: the others' processes would only take memory."""
        self._is_starting = True
        for name, warmth in self._roles.items():
            if name != role and warmth.state != "off":
                self._workers.cool(name)
                self._settle(warmth, "off", "another role had this node")

    def is_warming(self, role: str) -> bool:
        """Whether workers should wait a moment: they would import the same, each for itself."""
        warmth = self._roles.get(role)
        return (
            warmth is not None and warmth.state in ("probing", "warming") and self._clock.monotonic() < warmth.until
        )

    async def settled(self, role: str) -> None:
        """Wait until the role's process does not warm up any more, or has taken too long."""
        warmth = self._roles[role]
        left_s = warmth.until - self._clock.monotonic()
        log.info("the workers of %s wait for their warm process, for %.0f s at most", role, left_s)
        try:
            await asyncio.wait_for(warmth.settled.wait(), left_s)
        except TimeoutError:
            log.warning("the warm process of %s is not ready: its workers start cold", role)

    def of(self, role: str) -> tuple[str | None, str | None]:
        """The role, if its workers can be forked from a warm process; else why they cannot, or None, None."""
        warmth = self._roles.get(role)
        if warmth is None:
            return None, None
        if warmth.state == "ready":
            return role, None
        return None, warmth.why or "the warm process is not ready yet"

    def started(self, role: str) -> None:
        """The workers of the role run: now there is time to make what has ended again."""
        self._is_starting = False
        warmth = self._roles.get(role)
        if warmth is not None and warmth.state == "ended":
            self._warm(warmth)

    def heard(self, event: WarmSaid) -> None:
        """A warm process has said something, or ended."""
        warmth = self._roles.get(event.role)
        if warmth is None or warmth.state == "off":
            return
        word, *rest = event.words
        if word == "ready":
            self._ready(warmth, int(rest[0]), int(rest[1]), dict(zip(rest[2::2], rest[3::2], strict=True)))
        elif word == "refused":
            self._refused(warmth, name=rest[0], why=rest[1])
        elif word == "failed" or warmth.state != "ready":
            self._fail(warmth, rest[0])
        else:
            self._ended(warmth, rest[0])

    # ---- what follows

    async def _probe(self, warmth: RoleWarmth) -> None:
        """Find out whether the role's Python loads the hook: without it the program itself would run."""
        role = warmth.role
        why = "its workers run in a container" if role.container is not None else None
        env, workdir = self._environment(role), role.workdir or self._plan.workdir
        find = partial(_find, path={**environment.child_environment({}), **env}.get("PATH"), workdir=workdir)
        why = why or why_cold(role.command, find)
        if why is None:
            why = await _ask([*probe_command(role.command, find), "pass"], env, workdir)
        if why is not None:
            self._fail(warmth, why)
        else:
            self._warm(warmth)

    def _warm(self, warmth: RoleWarmth) -> None:
        if warmth.state == "off":
            return
        if warmth.state != "warming":
            warmth.began = self._clock.monotonic()
            warmth.until = warmth.began + warmth.spec.timeout
        warmth.state, warmth.why = "warming", None
        warmth.settled.clear()
        warmth.attempt += 1
        role, spec = warmth.role, warmth.spec
        imports = () if spec.imports == "auto" else spec.imports
        setup = spec.setup if spec.setup and spec.setup not in warmth.skipped else ""
        wanted = [
            " ".join(RANK_VARIABLES),
            str(spec.memory or 0),
            setup,
            *(name for name in imports if name not in warmth.skipped),
        ]
        self._workers.warm(
            role.name, role.command, self._environment(role), role.workdir or self._plan.workdir, wanted
        )
        asyncio.get_running_loop().call_later(spec.timeout, self._too_late, warmth, warmth.attempt)

    def _environment(self, role: RolePlan) -> dict[str, str]:
        """What is the same for all workers of the role on this node."""
        return {
            **role_environment(role.env, workers=role.workers_per_node),
            "ROLE_NAME": role.name,
            "TORCHELASTIC_MAX_RESTARTS": str(self._plan.fault_tolerance.max_restarts.count),
            "NVRX_JOB_ID": self._folder.job_id,
            "NVRX_NODE": self._node,
            "NVRX_STORE_FILE": str(self._folder.store_path.absolute()),
            **self._stacks.environment(role.env),
        }

    def _ready(self, warmth: RoleWarmth, modules: int, memory_bytes: int, failed: dict[str, str]) -> None:
        took_s = self._clock.monotonic() - warmth.began
        self._settle(warmth, "ready", None)
        log.info("the warm process of %s waits: %d modules, %.1f s", warmth.role.name, modules, took_s)
        self._publisher.publish(
            Prewarmed,
            role=warmth.role.name,
            modules=modules,
            took_s=took_s,
            memory_bytes=memory_bytes,
            skipped={**warmth.skipped, **failed},
        )

    def _refused(self, warmth: RoleWarmth, *, name: str, why: str) -> None:
        """Again, without what no fork may inherit."""
        log.warning("the warm process of %s: %s; it is made again without that", warmth.role.name, why)
        warmth.skipped[name] = why
        warmth.refusals += 1
        if warmth.refusals > MOST_REFUSALS:
            self._fail(warmth, f"more than {MOST_REFUSALS} modules cannot be imported ahead; the last: {why}")
        else:
            self._warm(warmth)

    def _ended(self, warmth: RoleWarmth, why: str) -> None:
        log.warning("the warm process of %s has ended: %s", warmth.role.name, why)
        warmth.ends += 1
        if warmth.ends > MOST_ENDS:
            self._fail(warmth, f"the warm process has ended {warmth.ends} times; at last: {why}")
            return
        self._settle(warmth, "ended", why)
        if not self._is_starting:
            self._warm(warmth)

    def _too_late(self, warmth: RoleWarmth, attempt: int) -> None:
        if warmth.state == "warming" and warmth.attempt == attempt:
            self._workers.cool(warmth.role.name)
            self._fail(warmth, f"the warm process was not ready within {words(warmth.spec.timeout)}")

    def _fail(self, warmth: RoleWarmth, why: str) -> None:
        self._settle(warmth, "off", why)
        if (warmth.role.name, why) not in self._said:
            self._said.add((warmth.role.name, why))
            log.warning("the workers of %s start cold: %s", warmth.role.name, why)
            self._publisher.publish(PrewarmFailed, role=warmth.role.name, why=why)

    def _settle(self, warmth: RoleWarmth, state: State, why: str | None) -> None:
        warmth.state, warmth.why = state, why
        warmth.settled.set()


def _find(program: str, *, path: str | None, workdir: str) -> str | None:
    """As the supervisor will find it."""
    return shutil.which(str(Path(workdir) / program) if "/" in program else program, path=path)


async def _ask(command: list[str], env: dict[str, str], workdir: str) -> str | None:
    """Why this Python cannot be warmed; None: it can."""
    try:
        asked = await asyncio.create_subprocess_exec(
            *command,
            env={**environment.child_environment({}), **env, "NVRX_WARM_FD": "probe"},
            cwd=workdir,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    try:
        said, _ = await asyncio.wait_for(asked.communicate(), PROBE_S)
    except TimeoutError:
        asked.kill()
        return f"{command[0]} did not start within {PROBE_S:.0f} s"
    if said.decode(errors="replace") != PROBE:
        return f"{Path(command[0]).name} does not load nvrx-slurm's start-up hook"
    return None
