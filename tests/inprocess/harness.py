"""A group of ranks as real processes, and their reports."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from nvrx_slurm.inprocess import store_keeper
from tests.forks import Forked, Forks
from tests.inprocess.actions import children
from tests.inprocess.logs import WAIT_S, until_logged
from tests.inprocess.script import Script

ROOT = Path(__file__).parents[2]
_MARK = "SCENARIO_GROUP"
_FOREIGN = ("NVRX_", "SLURM_", "TORCHELASTIC_", "OMPI_", "PMIX_", "PMI_", "MASTER_", "GROUP_")


@dataclass(frozen=True)
class Report:
    """One event that a rank reported."""

    rank: int
    event: str
    facts: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.facts[name]
        except KeyError:
            raise AttributeError(name) from None


class Group:
    """The ranks of one scenario. They start at once; `close` ends them and all that they have started."""

    def __init__(
        self, script: Script, world: int, *, forks: Forks | None, name: str | None = None, **variables: str
    ) -> None:
        self.script, self.world, self._forks = script, world, forks
        self.name = name or uuid.uuid4().hex
        self.reports: list[Report] = []
        self._variables = variables
        self._selector = selectors.DefaultSelector()
        self._unread: dict[int, bytes] = {}
        self._orders: dict[int, IO[bytes]] = {}
        self.folder = Path(script.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        for place in ("tmp", "runtime"):
            (self.folder / place).mkdir(mode=0o700, exist_ok=True)
        (self.folder / "script.json").write_bytes(msgspec.json.encode(script))
        self.ranks: dict[int, Forked | subprocess.Popen[bytes]] = {rank: self._spawn(rank) for rank in range(world)}

    def _spawn(self, rank: int) -> Forked | subprocess.Popen[bytes]:
        (orders, ordering), (telling, reports) = os.pipe(), os.pipe()
        with (self.folder / f"rank-{rank}.log").open("ab") as log:
            words, environment = [self.script.folder], self._environment(rank)
            process: Forked | subprocess.Popen[bytes]
            if self._forks is not None:
                descriptors = (orders, reports, log.fileno())
                process = self._forks.start(words, cwd=ROOT, env=environment, descriptors=descriptors)
            else:
                argv = [sys.executable, "-m", "tests.inprocess.rank", *words]
                process = subprocess.Popen(argv, stdin=orders, stdout=reports, stderr=log, cwd=ROOT, env=environment)
        os.close(orders)
        os.close(reports)
        self._unread[rank] = b""
        self._selector.register(telling, selectors.EVENT_READ, rank)
        self._orders[rank] = os.fdopen(ordering, "wb", buffering=0)  # so nothing is left to write at its end
        return process

    def _environment(self, rank: int) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world, "LOCAL_WORLD_SIZE": self.world}
        return ours | {name: str(value) for name, value in launch.items()} | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": self.name,
            "TMPDIR": str(self.folder / "tmp"),
            "XDG_RUNTIME_DIR": str(self.folder / "runtime"),
            _MARK: self.name,
        } | self._variables  # fmt: skip

    # ---- the ranks' reports

    def expect(self, event: str, rank: int, *, timeout: float = WAIT_S, **facts: Any) -> Report:
        """Wait for the first such event of a rank."""
        deadline = time.monotonic() + timeout
        while True:
            for report in self.all(event, rank=rank, **facts):
                return report
            if not self._is_telling(rank):
                raise AssertionError(f"rank {rank} has ended, and did not report {event} {facts or ''}")
            if not self._hear(deadline):
                raise AssertionError(f"rank {rank} did not report {event} {facts or ''} in {timeout:.0f} s")

    def all(self, event: str, **facts: Any) -> list[Report]:
        """Every such event so far, in the order in which they were read."""
        wanted = {"event": event, **facts}
        return [
            report for report in self.reports if all(_fact(report, name) == value for name, value in wanted.items())
        ]

    def entered(self, ranks: list[int], iteration: int, **facts: Any) -> list[Report]:
        """Wait until these ranks are in the function, in this iteration."""
        return [self.expect("fn", rank, iteration=iteration, **facts) for rank in ranks]

    def ended(self, rank: int, *, timeout: float = WAIT_S) -> int:
        """Wait for the end of a rank's process and for all its reports. Returns its exit code, negative for a
        signal."""
        deadline = time.monotonic() + timeout
        process = self.ranks[rank]
        while self._is_telling(rank) and self._hear(deadline):
            pass
        try:
            return process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank {rank} still runs after {timeout:.0f} s") from None

    def _is_telling(self, rank: int) -> bool:
        return any(key.data == rank for key in self._selector.get_map().values())

    def _hear(self, deadline: float) -> bool:
        """Read what has been reported; returns False at the deadline."""
        ready = self._selector.select(max(0.0, deadline - time.monotonic()))
        for key, _ in ready:
            self._read(key.fd, key.data)
        return bool(ready)

    def _read(self, telling: int, rank: int) -> None:
        data = os.read(telling, 65536)
        if not data:
            self._selector.unregister(telling)
            os.close(telling)
            return
        *lines, self._unread[rank] = (self._unread[rank] + data).split(b"\n")
        for line in lines:
            facts = msgspec.json.decode(line)
            self.reports.append(Report(rank, facts.pop("event"), facts))

    # ---- orders and signals

    def order(self, rank: int, iteration: int, action: str) -> None:
        """Have a rank that is in the function do this action. A rank that has ended ignores it."""
        with contextlib.suppress(BrokenPipeError):
            self._orders[rank].write(f"{iteration} {action}\n".encode())

    def order_all(self, ranks: list[int], iteration: int, action: str) -> None:
        for rank in ranks:
            self.order(rank, iteration, action)

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.ranks[rank].send_signal(number)

    def freeze(self, ranks: list[int]) -> None:
        for rank in ranks:
            self.signal(rank, signal.SIGSTOP)

    def kill(self, ranks: list[int]) -> None:
        """Kill these ranks in their current iteration. They are stopped first, so that none goes on between two
        deaths."""
        self.freeze(ranks)
        for rank in ranks:
            self.signal(rank, signal.SIGKILL)

    def stop(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)

    def thaw(self, pid: int) -> None:
        """Continue a stopped process; one that has ended is ignored."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def monitor_of(self, rank: int) -> int:
        """The monitor process of a rank."""
        (monitor,) = children(self.ranks[rank].pid)
        return monitor

    def until_logged(self, rank: int, words: str) -> None:
        """Wait until the rank's log contains these words."""
        until_logged(self.folder / f"rank-{rank}.log", words)

    def let_go(self, rank: int) -> None:
        """End a rank that lingers."""
        self._orders[rank].close()

    # ---- the end

    def processes(self) -> list[int]:
        """Every process of the group that runs: ranks, monitors, and their children. A forked rank is found by its
        standard error, the rank's log, since /proc does not show its environment."""
        mark, logs = f"{_MARK}={self.name}".encode(), f"{self.folder}/rank-"
        return [pid for pid in _all_pids() if _has_mark(pid, mark) or _writes_to(pid, logs)]

    def until_no_process(self, timeout: float = WAIT_S) -> None:
        """Wait for the end of all processes. Monitors of dead ranks need a moment."""
        deadline = time.monotonic() + timeout
        while left := self.processes():
            with _pidfd(left[0]) as handle, selectors.DefaultSelector() as selector:
                if handle is not None:
                    selector.register(handle, selectors.EVENT_READ)
                    if not selector.select(deadline - time.monotonic()):
                        raise AssertionError("left behind: " + "; ".join(_described(pid) for pid in left))

    def litter(self) -> list[str]:
        """What is left in the folders for temporary and runtime files, and the folder of the store that ranks
        start."""
        kept = {store_keeper._folder(store_keeper.VALKEY, report.group) for report in self.all("begin")}
        own = [path for place in ("tmp", "runtime") for path in (self.folder / place).rglob("*")]
        return [str(path) for path in (*own, *kept) if path.exists()]

    def close(self) -> None:
        """Kill all that still runs."""
        for process in self.ranks.values():
            process.kill()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.ranks.values():
            process.wait()
        for orders in self._orders.values():
            orders.close()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()

    def story(self) -> str:
        """The reports and logs of all ranks, for the message of a failed scenario."""
        parts = [f"{report.rank}: {report.event} {report.facts}" for report in self.reports]
        for log in sorted(self.folder.glob("*.log")):
            parts.append(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}")
        return "\n".join(parts)


@contextlib.contextmanager
def told_when_failing(group: Group) -> Iterator[Group]:
    """Print every rank's log if the scenario fails. Leave no process behind in either case."""
    try:
        yield group
    except BaseException:
        print(group.story())
        raise
    finally:
        group.close()


def _fact(report: Report, name: str) -> Any:
    return getattr(report, name) if name in ("rank", "event") else report.facts.get(name)


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _has_mark(pid: int, mark: bytes) -> bool:
    with contextlib.suppress(OSError):  # the environment of a dead process is empty
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _writes_to(pid: int, logs: str) -> bool:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/fd/2").readlink()).startswith(logs)
    return False


def _described(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes().replace(bytes(1), b' ').decode()}"
    return f"{pid}, gone by now"


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int | None]:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)
