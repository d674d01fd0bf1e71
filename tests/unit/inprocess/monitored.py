"""Real processes with real monitors on a real store, which the tests control and inspect."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from nvrx_slurm.inprocess.ledger import AnyEntry, GroupLedger, Log, Lost
from nvrx_slurm.inprocess.store_redis import RedisStore
from nvrx_slurm.util.processes import is_alive
from tests.inprocess.servers import Valkey
from tests.waiting import until

ROOT = Path(__file__).parents[3]
WAIT_S = 30.0
PROMPT = {"soft_timeout_s": 60.0, "hard_timeout_s": 90.0, "heartbeat_timeout_s": 30.0, "heartbeat_interval_s": 0.05}
PROMPT |= {"interval_s": 0.05, "grace_s": 0.1}


class Rank:
    """One process and its monitor."""

    def __init__(self, valkey: Valkey, group: str, member: int, members: int, log: Path, **options: Any) -> None:
        given = {
            "store": "redis",
            "ends_early": False,
            "group": group,
            "call": 0,
            "member": member,
            "members": members,
            "rank": member,
            "host": "here",
        }
        given |= {"store_kwargs": {"url": valkey.url}, "logfile": str(log)}
        with log.with_suffix(".err").open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.unit.inprocess.monitored_rank", json.dumps(given | PROMPT | options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                text=True,
            )
        self.log = log
        self.started = False

    @property
    def monitor(self) -> int:
        """The monitor's process id, once the monitor is ready."""
        if not self.started:
            self._monitor = int(self._answer())
            self.started = True
        return self._monitor

    @property
    def errors(self) -> str:
        """What was written to its standard error."""
        return self.log.with_suffix(".err").read_text()

    def does(self, expression: str) -> Any:
        """Evaluates the expression in the process; returns the result as JSON gives it."""
        self.starts(expression)
        return self._answer()

    def starts(self, expression: str) -> None:
        """Starts to evaluate it, without waiting for the result."""
        assert self.monitor and self.process.stdin
        self.process.stdin.write(f"{expression}\n")
        self.process.stdin.flush()

    def _answer(self) -> Any:
        assert self.process.stdout
        assert select.select([self.process.stdout], [], [], WAIT_S)[0], f"no answer: {self.errors}"
        line = self.process.stdout.readline()
        assert line, f"it ended: {self.errors}"
        return json.loads(line)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        """Waits for its end; returns its exit code, or minus the signal."""
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        pids = [self.process.pid] + ([self._monitor] if self.started else [])
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Group:
    """Ranks with one log, which the test reads and writes."""

    def __init__(
        self,
        valkey: Valkey,
        name: str,
        members: int,
        folder: Path,
        each: list[dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        """`each`: options of one rank after the other, in addition to those of all ranks."""
        self.name, self.members = name, members
        self.store = RedisStore(url=valkey.url)
        self.connection = self.store.connect(name, 0)
        self.log = Log(self.connection, members)
        self.ranks: list[Rank] = []
        for member in range(members):
            own = options | (each[member] if each else {})
            self.ranks.append(Rank(valkey, name, member, members, folder / f"monitor-{member}.log", **own))

    def until_watched(self) -> None:
        for rank in self.ranks:
            assert rank.monitor

    def wrote(self, entry: AnyEntry) -> None:
        assert self.log.propose(entry)

    @property
    def ledger(self) -> GroupLedger:
        self.log.refresh()
        return self.log.ledger

    def lost(self, member: int) -> Lost:
        """The record of a member's loss, as soon as there is one."""
        deadline = time.monotonic() + WAIT_S
        while member not in self.log.ledger.lost and time.monotonic() < deadline:
            self.connection.read(self.log.ledger.length, WAIT_S)
            self.log.refresh()
        return self.log.ledger.lost[member]

    def until_dead(self, pid: int) -> None:
        until(lambda: not is_alive(pid), f"process {pid} has ended")

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.connection.close()
