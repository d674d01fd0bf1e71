"""The warm processes of this node's roles: which there are, what they import, when they are made again.

The supervisor keeps the processes (`warm.py`); here is decided what becomes of them. A warm process is a gain and
never a condition: if anything goes wrong with it, the workers of its role start cold, and the journal says why.

    probing ──▶ warming ──▶ ready ──▶ ended (died, out of date) ──▶ warming …
       └───────────┴──▶ off, with the reason

`imports: auto`: until a list is known, the first worker of a node writes down what it imports (the start-up hook does
it), up to its first step. That list is kept beside the jobs' folders, for the next job with the same command.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec

from nvrx_slurm.agent.events import Cycle
from nvrx_slurm.agent.machine import BoardPort, StacksPort, WorkersPort
from nvrx_slurm.agent.page_cache import PageCache
from nvrx_slurm.agent.reporting import FactPublisher
from nvrx_slurm.agent.starting import RANK_VARIABLES, role_environment
from nvrx_slurm.agent.workers import WarmSaid
from nvrx_slurm.errors import UnsafePath
from nvrx_slurm.jobspec import env as environment
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.jobspec.prewarm import PrewarmSpec, probe_command
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import FromAgent, Prewarmed, PrewarmFailed
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.durations import words
from nvrx_slurm.util.files import write_private
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.ownership import private_folder, read_owned
from nvrx_slurm.util.tasks import run_program
from nvrx_slurm.util.threads import awaitable_thread, in_thread

log = get_logger("agent")

# What the start-up hook prints when it is asked whether it is there.
PROBE = "nvrx-warm"

PROBE_S = 60.0
MOST_REFUSALS = 8
# In a row, without a start of workers between them.
MOST_ENDS = 5

# How often a standby node looks whether the nodes at work have learned what to import.
READ_EVERY_S = 10.0

# After so long the imports of a worker that reports no steps are taken for all.
LEARN_S = 120.0

State = Literal["probing", "warming", "ready", "ended", "off"]


class RoleWarmth(msgspec.Struct):
    """A role and its warm process. `imports`: None until they are learned; `skipped`: module → why it is not imported
    there; `until`: how long workers wait for it; `settled`: it does not warm up now; `is_learned`: by this node."""

    role: RolePlan
    spec: PrewarmSpec
    imports: list[str] | None
    is_learned: bool = False
    state: State = "probing"
    why: str | None = None
    skipped: dict[str, str] = {}
    began: float = 0.0
    until: float = 0.0
    attempt: int = 0
    refusals: int = 0
    ends: int = 0
    settled: asyncio.Event = msgspec.field(default_factory=asyncio.Event)


class Prewarming(msgspec.Struct, eq=False):
    """Of one node. `go`: runs a task beside the agent's loop."""

    plan: Plan
    folder: JobFolder
    node: str
    workers: WorkersPort
    stacks: StacksPort
    publisher: FactPublisher
    clock: Clock
    go: Callable[[Coroutine[Any, Any, None]], object]
    _roles: dict[str, RoleWarmth] = {}
    _page_cache: PageCache | None = None
    _unsent: list[tuple[type[FromAgent], dict[str, Any]]] | None = []  # until the node has joined
    _said: set[tuple[str, str]] = set()
    _is_starting: bool = False
    _hurry: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        for role in self.plan.roles:
            if (spec := role.prewarm) is not None and spec.wants_process:
                self._roles[role.name] = RoleWarmth(
                    role, spec, None if spec.imports == "auto" else list(spec.imports)
                )

    def begin(self) -> None:
        """Make a warm process for each role that asks for one: this node does not know yet which it will have."""
        for warmth in self._roles.values():
            warmth.state = "probing"
            self._restart(warmth)
            self.go(self._probe(warmth))
        specs = [role.prewarm for role in self.plan.roles if role.prewarm is not None]
        if patterns := [pattern for spec in specs for pattern in spec.read]:
            self._page_cache = self._page_cache or PageCache(self.clock)
            bounds = [spec.memory for spec in specs if spec.memory is not None]
            self._page_cache.begin(patterns, self.plan.workdir, min(bounds, default=None))

    def joined(self) -> None:
        """The controller knows this node: it takes no fact of a node before that."""
        unsent, self._unsent = self._unsent or [], None
        for kind, fields in unsent:
            self.publisher.publish(kind, **fields)

    def assigned(self, cycle: Cycle) -> str | None:
        """The node has ranks of this cycle, and starts their workers. Returns the role, if they can be started warm;
        else the cycle says why not."""
        self._is_starting = True
        role = cycle.assignment.role
        # The other roles' processes end: they would only take memory.
        for name, warmth in self._roles.items():
            if name != role and warmth.state != "off":
                self.workers.cool(name)
                self._settle(warmth, "ended", "another role had this node")
        spec = next(each.prewarm for each in self.plan.roles if each.name == role)
        if self._page_cache is not None:
            read, memory = (spec.read, spec.memory) if spec else ((), None)
            self._page_cache.begin(read, self.plan.workdir, memory, cycle.ranks)
        found = self._roles.get(role)
        if found is None or found.state == "ready":
            return role if found else None
        cycle.cold = found.why or "the warm process is not ready yet"
        return None

    def learns(self, role: str) -> bool:
        """Whether a worker should write down what it imports."""
        warmth = self._roles.get(role)
        return warmth is not None and warmth.imports is None and warmth.state != "off"

    def stepped(self, cycle: Cycle, rank: int) -> None:
        """This worker has reported its first step."""
        # Only the first worker writes the list: when another one steps, the list may not be complete yet.
        if rank == cycle.assignment.first_rank:
            self._learn(cycle)

    def _learn(self, cycle: Cycle) -> None:
        """What this node's first worker has imported by now is warmed from now on."""
        warmth = self._roles.get(cycle.assignment.role)
        if warmth is None or warmth.imports is not None or cycle.modules_file is None or warmth.state == "off":
            return
        with contextlib.suppress(OSError):
            names = cycle.modules_file.read_text(errors="replace").split()
            program = _module_to_run(warmth.role.command)
            warmth.imports = [name for name in dict.fromkeys(names) if name not in program]
            warmth.is_learned = cycle.assignment.group_rank == 0
            log.info("%s has imported %d modules by its first step", warmth.role.name, len(warmth.imports))
            self._warm(warmth)

    def look(self, board: BoardPort) -> None:
        """Called with each heartbeat: the workers may have saved a checkpoint."""
        if self._page_cache is not None:
            self._page_cache.saw(board.readings())

    def leave(self) -> None:
        """The agent leaves, and its supervisor will end the processes."""
        if self._page_cache is not None:
            self._page_cache.stop()

    def is_warming(self, role: str) -> bool:
        """Whether workers should wait a moment: they would import the same, each for itself."""
        warmth = self._roles.get(role)
        return warmth is not None and warmth.state in ("probing", "warming") and self.clock.monotonic() < warmth.until

    async def settled(self, role: str) -> None:
        """Wait until the role's process does not warm up any more, or has taken too long."""
        warmth = self._roles[role]
        left_s = warmth.until - self.clock.monotonic()
        log.info("the workers of %s wait for their warm process, for %.0f s at most", role, left_s)
        self._hurry.clear()
        waits = [asyncio.ensure_future(event.wait()) for event in (warmth.settled, self._hurry)]
        try:
            await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    def stop_waiting(self) -> None:
        """Something has happened that those who wait for a warm process must look at."""
        self._hurry.set()

    def started(self, cycle: Cycle) -> None:
        """The workers of a cycle run: now there is time to make what has ended again."""
        self._is_starting = False
        warmth = self._roles.get(cycle.assignment.role)
        if warmth is not None and warmth.state == "ended":
            self._warm(warmth)
        elif warmth is not None and warmth.state == "ready":
            warmth.ends = 0
        if cycle.modules_file is not None:
            asyncio.get_running_loop().call_later(LEARN_S, self._learn, cycle)

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
        # One that ends before it is ready would end so again.
        elif word == "failed" or warmth.state != "ready":
            self._fail(warmth, rest[0])
        else:
            self._ended(warmth, rest[0])

    # ---- what follows

    async def _probe(self, warmth: RoleWarmth) -> None:
        """Find out whether the role's Python loads the hook: without it the program itself would run."""
        role = warmth.role
        why = "its workers run in a container" if role.container is not None else None
        if warmth.imports is None:
            warmth.imports = await awaitable_thread(partial(self._read_list, role), "prewarm list")
        env, workdir = self._environment(role), role.workdir or self.plan.workdir
        path = {**environment.child_environment({}), **env}.get("PATH")

        def find(program: str) -> str | None:
            """As the supervisor will find it."""
            return shutil.which(str(Path(workdir) / program) if "/" in program else program, path=path)

        if why is None:
            try:
                # In a thread: the file system of the work folder or the program may not answer.
                looking = awaitable_thread(partial(probe_command, role.command, find), "prewarm probe")
                command = await asyncio.wait_for(looking, PROBE_S)
            except TimeoutError:
                why = f"{role.command[0]} could not be found within {PROBE_S:.0f} s"
            except ValueError as reason:
                why = str(reason)
            else:
                why = await _ask([*command, "pass"], env, workdir)
        if why is not None:
            self._fail(warmth, why)
        elif warmth.state == "probing":  # else another role has got this node meanwhile
            self._warm(warmth)
            if warmth.imports is None:
                await self._follow_list(warmth)

    def _warm(self, warmth: RoleWarmth) -> None:
        if warmth.state == "off":
            return
        if warmth.state != "warming":
            self._restart(warmth)
        warmth.state, warmth.why = "warming", None
        warmth.settled.clear()
        warmth.attempt += 1
        role, spec = warmth.role, warmth.spec
        setup = spec.setup if spec.setup and spec.setup not in warmth.skipped else ""
        wanted = [
            " ".join(RANK_VARIABLES),
            str(spec.memory or 0),
            setup,
            *(name for name in warmth.imports or () if name not in warmth.skipped),
        ]
        workdir = role.workdir or self.plan.workdir
        ahead = role.workers_per_node
        self.workers.warm(role.name, role.command, self._environment(role), workdir, wanted, ahead)
        # With its number: no timer of an earlier attempt ends this one.
        asyncio.get_running_loop().call_later(spec.timeout, self._too_late, warmth, warmth.attempt)

    def _restart(self, warmth: RoleWarmth) -> None:
        warmth.began = self.clock.monotonic()
        warmth.until = warmth.began + warmth.spec.timeout

    def _environment(self, role: RolePlan) -> dict[str, str]:
        common = role_environment(role, self.plan, self.folder, self.node)
        return common | self.stacks.environment(role.env)

    def _ready(self, warmth: RoleWarmth, modules: int, memory_bytes: int, failed: dict[str, str]) -> None:
        took_s = self.clock.monotonic() - warmth.began
        self._settle(warmth, "ready", None)
        log.info("the warm process of %s waits: %d modules, %.1f s", warmth.role.name, modules, took_s)
        is_auto = warmth.spec.imports == "auto"  # the user has not asked for the ones that fail
        skipped = warmth.skipped if is_auto else {**warmth.skipped, **failed}
        self._publish(
            Prewarmed,
            role=warmth.role.name,
            modules=modules,
            took_s=took_s,
            memory_bytes=memory_bytes,
            skipped=dict(skipped),
        )
        if warmth.is_learned:
            warmth.is_learned = False
            found = [name for name in warmth.imports or () if name not in skipped and name not in failed]
            in_thread(partial(self._write_list, warmth.role, found), "prewarm list")

    def _refused(self, warmth: RoleWarmth, *, name: str, why: str) -> None:
        """Again, without what no fork may inherit. Workers do not wait for that where no user has asked for the list:
        each refusal costs a whole attempt, and the list of `auto` may have many."""
        log.warning("the warm process of %s: %s; it is made again without that", warmth.role.name, why)
        warmth.skipped[name] = why
        warmth.refusals += 1
        if warmth.refusals > MOST_REFUSALS and warmth.spec.imports == "auto" and name in (warmth.imports or ()):
            warmth.imports = (warmth.imports or [])[: (warmth.imports or []).index(name)]  # what comes before can be
            self._warm(warmth)
        elif warmth.refusals > MOST_REFUSALS:
            self._fail(warmth, f"more than {MOST_REFUSALS} modules cannot be imported ahead; the last: {why}")
        else:
            self._warm(warmth)
        if warmth.spec.imports == "auto":
            warmth.until = self.clock.monotonic()
            warmth.settled.set()

    def _ended(self, warmth: RoleWarmth, why: str) -> None:
        log.warning("the warm process of %s has ended: %s", warmth.role.name, why)
        warmth.ends += 1
        if warmth.ends > MOST_ENDS:
            self._fail(warmth, f"the warm process has ended {warmth.ends} times; at last: {why}")
            return
        self._settle(warmth, "ended", why)
        # Not while workers start, which need the processors: `started` makes it again.
        if not self._is_starting:
            self._warm(warmth)

    def _too_late(self, warmth: RoleWarmth, attempt: int) -> None:
        if warmth.state == "warming" and warmth.attempt == attempt:
            self.workers.cool(warmth.role.name)
            self._fail(warmth, f"the warm process was not ready within {words(warmth.spec.timeout)}")

    def _fail(self, warmth: RoleWarmth, why: str) -> None:
        self._settle(warmth, "off", why)
        if (warmth.role.name, why) not in self._said:
            self._said.add((warmth.role.name, why))
            log.warning("the workers of %s start cold: %s", warmth.role.name, why)
            self._publish(PrewarmFailed, role=warmth.role.name, why=why)

    def _publish(self, kind: type[FromAgent], **fields: Any) -> None:
        if self._unsent is None:
            self.publisher.publish(kind, **fields)
        else:
            self._unsent.append((kind, fields))

    def _settle(self, warmth: RoleWarmth, state: State, why: str | None) -> None:
        warmth.state, warmth.why = state, why
        warmth.settled.set()

    # ---- the lists of `imports: auto`

    async def _follow_list(self, warmth: RoleWarmth) -> None:
        """A standby node has no worker that could tell it."""
        while warmth.imports is None:
            await asyncio.sleep(READ_EVERY_S)
            names = await awaitable_thread(partial(self._read_list, warmth.role), "prewarm list")
            if warmth.imports is None and names is not None:
                warmth.imports = names
                self._warm(warmth)

    def _list_file(self, role: RolePlan) -> Path:
        what = json.dumps([role.command, role.workdir or self.plan.workdir])
        return Path(self.plan.folder) / ".prewarm" / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"

    def _read_list(self, role: RolePlan) -> list[str] | None:
        file = self._list_file(role)
        problems = (OSError, UnsafePath, ValueError, KeyError, TypeError)
        # In a base folder with the sticky bit (`/tmp`) another user may have made the folder of the lists, and would
        # choose there what the warm process imports.
        with contextlib.suppress(*problems), private_folder(file.parent) as folder:
            names = json.loads(read_owned(file, dir_fd=folder))["modules"]
            if isinstance(names, list) and all(isinstance(name, str) for name in names):
                return names
        return None

    def _write_list(self, role: RolePlan, names: list[str]) -> None:
        file = self._list_file(role)
        data = json.dumps({"command": role.command, "modules": names}, indent=1).encode() + b"\n"
        with contextlib.suppress(OSError, UnsafePath):
            file.parent.mkdir(mode=0o700, exist_ok=True)
            with private_folder(file.parent) as folder:
                write_private(file, data, dir_fd=folder)


def _module_to_run(command: Sequence[str]) -> tuple[str, ...]:
    """What `python -m` looks for and runs: importing it ahead would run it as another module."""
    for option, word in pairwise(command):
        if re.fullmatch("-[A-Za-z]*m", option):
            return word, f"{word}.__main__"
    return ()


async def _ask(command: list[str], env: dict[str, str], workdir: str) -> str | None:
    """Why this Python cannot be warmed; None: it can."""
    # By a shell: until a child has entered its folder and executed its program, this whole process would stand still
    # (vfork(2)), and a file system may not answer.
    argv = ("/bin/sh", "-c", 'cd -- "$0" || exit 126; exec "$@"', workdir, *command)
    probe_env = {**environment.child_environment({}), **env, "NVRX_WARM_FD": "probe"}
    try:
        code, said = await run_program(argv, env=probe_env, folder="/", timeout_s=PROBE_S)
    except TimeoutError:
        return f"{command[0]} did not start within {PROBE_S:.0f} s"
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    if code in (126, 127):  # sh(1)
        return f"{command[0]} cannot be executed in {workdir}"
    if said.decode(errors="replace") != PROBE:
        return f"{Path(command[0]).name} does not load nvrx-slurm's start-up hook"
    return None
