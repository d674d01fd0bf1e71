"""Two users of one machine. Alice runs the tests, and the product in them. Bob attacks her."""

from __future__ import annotations

import functools
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.forks import Forked, Forks

MAIN = Path(__file__).with_name("bob.py")
BOUND_S = 60.0
RESULT = "result: "


class Attack:
    """A function that runs as bob until it returns or the test ends. Its output is read line by line."""

    def __init__(self, process: subprocess.Popen[bytes] | Forked, stdin: IO[str], stdout: IO[str]) -> None:
        self.process, self.stdin, self._stdout = process, stdin, stdout

    def line(self) -> str:
        """The next line that it prints; the test fails if it has ended."""
        line = self._stdout.readline()
        assert line, "bob has ended: see his standard error above"
        return line.rstrip("\n")

    def result(self) -> Any:
        """What the function returned. Earlier lines that the test has not read are dropped."""
        while not (line := self.line()).startswith(RESULT):
            pass
        return json.loads(line.removeprefix(RESULT))

    def end(self) -> None:
        """End it at once."""
        for stream in (self.stdin, self._stdout):
            stream.close()
        self.process.wait(BOUND_S)


class Bob:
    """A second unprivileged user. `uid` is his uid as alice's kernel sees it."""

    def __init__(self, launcher: list[str], uid: int, inner_uid: int) -> None:
        self.uid, self._launcher, self._inner_uid = uid, launcher, inner_uid
        self._running: list[Attack] = []

    def start(self, function: Callable[..., Any], *arguments: Any) -> Attack:
        """Start `function(*arguments)` as bob. It must be at the top level of its module, and its arguments JSON."""
        file = sys.modules[function.__module__].__file__
        assert file is not None
        words = [str(self._inner_uid), file, function.__name__]
        (orders, ordering), (telling, told) = os.pipe(), os.pipe()
        process: subprocess.Popen[bytes] | Forked
        if self._launcher:
            argv = [*self._launcher, sys.executable, str(MAIN), *words]
            process = subprocess.Popen(argv, stdin=orders, stdout=told)
        else:
            descriptors = (orders, told, 2)
            process = bobs().start(words, cwd=Path.cwd(), env=os.environ, descriptors=descriptors)
        os.close(orders)
        os.close(told)
        attack = Attack(process, os.fdopen(ordering, "w"), os.fdopen(telling))
        attack.stdin.write(json.dumps(arguments) + "\n")
        attack.stdin.flush()
        self._running.append(attack)
        return attack

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run the function to its end, and return what it returned."""
        return self.start(function, *arguments).result()

    def end(self) -> None:
        for attack in self._running:
            attack.end()


@functools.cache
def bobs() -> Forks:
    """The process from which bob is forked, before it changes user: importing his modules would take most of his
    time."""
    return Forks(
        "tests.security.bob",
        modules=(
            "pytest",
            "redis",
            "nvrx_slurm.agent.linux",
            "nvrx_slurm.inprocess.store_redis",
            "nvrx_slurm.transport",
            "tests.fault_harness",
            "tests.slurm_harness",
        ),
    )


def _bob() -> Bob | str:
    """A second user, or the reason why this machine has none."""
    nobody = pwd.getpwnam("nobody").pw_uid
    if os.geteuid() == 0:
        return Bob([], nobody, nobody)
    if shutil.which("sudo") and subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode == 0:
        return Bob(["sudo", "-n", "--preserve-env=PYTHONPATH"], nobody, nobody)
    spaces = ["unshare", "--user", "--map-root-user", "--map-auto"]
    if shutil.which("unshare") and subprocess.run([*spaces, "true"], capture_output=True).returncode == 0:
        mapped = subprocess.run([*spaces, "cat", "/proc/self/uid_map"], capture_output=True, text=True, check=True)
        first, outside, _ = next(map(int, row.split()) for row in mapped.stdout.splitlines() if row.split()[0] != "0")
        return Bob(spaces, outside, first)
    return "no second user: run as root, allow `sudo -n`, or add this user to /etc/subuid and install uidmap"


@pytest.fixture
def bob() -> Iterator[Bob]:
    """The attacker. In CI a machine without a second user fails the test; elsewhere it is skipped."""
    found = _bob()
    if isinstance(found, str):
        if os.environ.get("CI") == "true":
            pytest.fail(found)
        pytest.skip(found)
    yield found
    found.end()


@pytest.fixture
def common() -> Iterator[Path]:
    """A folder of alice's that both users can enter and read, as a project's folder is. pytest's own `tmp_path` is
    closed to bob."""
    folder = Path(tempfile.mkdtemp(prefix="nvrx-common-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
