"""A worker forked from a warm process sees the same as a worker that is started cold."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
import zipfile
from pathlib import Path
from unittest.mock import ANY

import pytest

from nvrx_slurm.agent.starting import RANK_VARIABLES
from nvrx_slurm.agent.supervisor import descendants, send_all
from nvrx_slurm.agent.workers import Exited, Spawned, WarmSaid, Workers
from nvrx_slurm.diagnostics.stacks.hook_client import hook_environment
from tests.harness import wait_gone

PROBE = Path(__file__).parents[2] / "warm_probe.py"


class Node:
    """Workers, and a role `main` that has a warm process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: asyncio.Queue = asyncio.Queue()
        self.workers = Workers(self.events.put_nowait)
        self.workers.start()
        (folder / "dumps").mkdir()

    async def next(self, kind, timeout=60.0):
        async with asyncio.timeout(timeout):
            while not isinstance(event := await self.events.get(), kind):
                pass
            return event

    def environment(self, own):
        return {**own, **hook_environment(own, self.folder / "dumps")}

    async def warm(self, argv, modules, *, cwd, setup="", ahead=0, **env):
        """Start the warm process; returns its first message."""
        spec = [" ".join(RANK_VARIABLES), "0", setup, *modules]
        self.workers.warm("main", list(map(str, argv)), self.environment(env), str(cwd), spec, ahead)
        return (await self.next(WarmSaid)).words

    def waiting(self):
        """The forks that wait to become a worker."""
        supervisor = self.workers.supervisor_pid
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
            return [int(pid) for pid in children if os.getsid(int(pid)) == int(pid)][1:]  # but for the warm process
        return []

    async def run(self, argv, *, cwd, warm, **env):
        """Run one worker; returns how it ended, its two outputs, and its report."""
        return (await self.run_all(argv, cwd=cwd, warm=warm, ranks=(0,), **env))[0]

    async def run_all(self, argv, *, cwd, warm, ranks, **env):
        files = []
        for rank in ranks:
            report = self.folder / f"report-{rank}"
            report.unlink(missing_ok=True)
            pipes = [os.pipe() for _ in range(2)]
            own = {**self.environment(env), "RANK": str(rank), "PROBE_REPORT": str(report)}
            self.workers.spawn(
                rank, list(map(str, argv)), own, str(cwd), pipes[0][1], pipes[1][1], "main" if warm else None
            )
            files.append([os.fdopen(read, "rb") for read, _ in pipes])
        ended, texts = {}, {}
        reading = [asyncio.gather(*(asyncio.to_thread(each.read) for each in pair)) for pair in files]
        while len(ended) < len(ranks):
            event = await self.next((Spawned, Exited))
            if isinstance(event, Spawned):
                assert event.warm == warm, event.cold
            else:
                ended[event.rank] = event
        results = []
        for rank, pair, both in zip(ranks, files, reading, strict=True):
            texts = await both
            for each in pair:
                each.close()
            report = self.folder / f"report-{rank}"
            found = json.loads(report.read_text()) if report.exists() else None
            results.append((ended[rank].code, ended[rank].signal, ended[rank].error, *texts, found))
        return results


@pytest.fixture
async def node(tmp_path):
    (tmp_path / "node").mkdir()
    node = Node(tmp_path / "node")
    yield node
    everybody = [node.workers.supervisor_pid, *descendants(node.workers.supervisor_pid)]
    node.workers.close()
    wait_gone(everybody)


MODULES = ("json", "asyncio", "logging", "multiprocessing", "concurrent.futures", "decimal", "uuid", "lib.helper")
HELPER = """
import atexit, gc, os, sys, warnings

os.environ["SET_BY_IMPORT"] = "1"
os.environ.setdefault("SET_UNLESS_THERE", "by import")
os.environ.pop("REMOVED_BY_IMPORT", None)
sys.path.append("/added/by/import")
warnings.filterwarnings("ignore", message="of the helper")
atexit.register(print, "at exit: the helper")
main_file = getattr(sys.modules["__main__"], "__file__", None)
print("printed by the import")
"""
OWN = {
    "PYTHONHASHSEED": "7",
    "REMOVED_BY_IMPORT": "1",
    "EMPTY": "",
    "BYTES": "\udcff",
    "TWO": "a=b\n",
    "RANK_LIKE": "x",
}
OF_THE_HOOK = {
    "__future__",
    "atexit",
    "_socket",
    "_struct",
    "struct",
    "ctypes",
    "_ctypes",
    "fcntl",
    "gc",
    "resource",
    "time",
}
OF_THE_HOOK |= {
    "random",
    "secrets",
    "hashlib",
    "_hashlib",
    "hmac",
    "_blake2",
    "_sha2",
    "_random",
    "_sha512",
    "bisect",
    "_bisect",
}


def normal(seen):
    """What a worker saw, without addresses and modules; and its modules."""
    seen = json.loads(re.sub(r"0x[0-9a-f]+", "0x", json.dumps(seen)))
    modules = seen.pop("modules")
    for name, names in modules.items():
        for each in [each for each in names if each.endswith("_addr") and name in ("ctypes", "_ctypes")]:
            names[each] = "an address"
    modules["logging"].pop("_startTime")  # differs in each worker; tested below
    return seen, modules


def program(form, folder):
    """Write the probe in this form; returns the command that runs it in the folder."""
    imports = f"import importlib; [importlib.import_module(each) for each in {MODULES!r}]"
    source, python = PROBE.read_text().replace("# imports", imports), sys.executable
    package = folder / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("mod", "__main__"):
        (package / f"{name}.py").write_text(source)
    script = folder / "train.py"
    script.write_text(source)
    (folder / "lib").mkdir()
    (folder / "lib" / "__init__.py").touch()
    (folder / "lib" / "helper.py").write_text(HELPER)
    if form in ("folder", "zip", "zipapp"):
        shutil.copytree(folder / "lib", package / "lib")
        with zipfile.ZipFile(folder / "probe.zip", "w") as archive:
            for path in package.rglob("*.py"):
                archive.write(path, path.relative_to(package))
        (folder / "application").write_bytes(b"#!/usr/bin/env python3\n" + (folder / "probe.zip").read_bytes())
        shutil.rmtree(folder / "lib")
    (folder / "links").mkdir()
    (folder / "links" / "other.py").symlink_to(script)
    for name, first in (("console", f"#!{python}"), ("split", f"#!/usr/bin/env -S {python} -u")):
        (folder / name).write_text(f"{first}\n{source}")
        (folder / name).chmod(0o755)
    return {
        "relative": [python, "train.py", "one", "--two=3"],
        "absolute": [python, script],
        "link": [python, "links/other.py"],
        "folder": [python, "pkg"],
        "zip": [python, folder / "probe.zip", "one"],
        "zipapp": [python, "application"],
        "module": [python, "-m", "pkg.mod", "one"],
        "package": [python, "-m", "pkg", "-x"],
        "code": [python, "-c", source, "one"],
        "console": [folder / "console", "one"],
        "split": ["./split", "one"],
        "options": [python, "-X", "dev", "-W", "error::UserWarning", "-O", "-u", "train.py"],
        "safe path": [python, "-P", "-B", "-s", "-bb", "train.py"],
    }[form]


FORMS = "relative absolute link folder zip zipapp module package code console split options"
FORMS = [*FORMS.split(), *(["safe path"] if sys.version_info >= (3, 11) else [])]


@pytest.mark.parametrize("form", FORMS)
async def test_worker_sees_the_same_cold_and_warm(node, tmp_path, form):
    """A worker sees the same interpreter, `__main__`, modules, streams, environment and process cold and warm, except
    for the modules that it finds imported."""
    work = tmp_path / "work"
    work.mkdir()
    argv = program(form, work)
    env = {**OWN, "PYTHONPATH": str(work)} if form == "safe path" else OWN
    cold = await node.run(argv, cwd=work, warm=False, **env)
    assert cold[:3] == (0, None, None), cold[4].decode()
    said = await node.warm(argv, MODULES, cwd=work, ahead=1, **env)
    assert said[0] == "ready"
    assert said[3:] == ()
    for _ in range(2):
        warm = await node.run(argv, cwd=work, warm=True, **env)
        assert warm[:3] == cold[:3], warm[4].decode()
        assert sorted(warm[3].splitlines()) == sorted(cold[3].splitlines())
        assert warm[4] == cold[4]
        (cold_seen, cold_modules), (warm_seen, warm_modules) = normal(cold[5]), normal(warm[5])
        assert warm_seen == cold_seen
        more = warm_modules.keys() - cold_modules.keys()
        assert cold_modules.keys() <= warm_modules.keys()
        assert more <= OF_THE_HOOK
        for name, names in cold_modules.items():
            assert warm_modules[name] == names, name


PROGRAMS = dict(each.split("\n", 1) for each in PROBE.with_name("warm_programs.txt").read_text().split("\n=== ")[1:])
LIBRARY = """
import warnings
def call(function, *arguments):
    return function(*arguments)
def warn():
    warnings.warn("deprecated", DeprecationWarning, stacklevel=2)
    warnings.warn("of the module", stacklevel=1)
"""
ENDING = """
class Ending:
    def __init__(self, name): self.name, self.own = name, self
    def __del__(self): print("end of", self.name)
KEPT = Ending("a cycle")
print("imported")
"""


@pytest.mark.parametrize("name", PROGRAMS)
async def test_worker_does_and_ends_the_same_cold_and_warm(node, tmp_path, name):
    """Cold and warm workers have the same exit codes, signals and output, tracebacks byte for byte, also with
    children by fork, spawn and forkserver."""
    (tmp_path / "lib").mkdir()
    for file, text in (("__init__", ""), ("helper", LIBRARY), ("late", "WHEN = 'late'"), ("ending", ENDING)):
        (tmp_path / "lib" / f"{file}.py").write_text(text)
    (tmp_path / "train.py").write_text(PROGRAMS[name], encoding="latin-1" if name == "encoding" else "utf-8")
    modules = (*MODULES, "lib.ending") if name == "finalizers of a module" else MODULES
    modules = tuple(each for each in modules if each != "lib.helper" or name != "import order")
    argv, env = [sys.executable, "train.py", "argument"], {"PYTHONHASHSEED": "3"}
    cold = await node.run(argv, cwd=tmp_path, warm=False, **env)
    assert (await node.warm(argv, modules, cwd=tmp_path, **env))[0] == "ready"
    written = [path.read_text() for path in tmp_path.glob("kept")]
    warm = await node.run(argv, cwd=tmp_path, warm=True, **env)
    assert [comparable(each) for each in warm] == [comparable(each) for each in cold]
    assert [path.read_text() for path in tmp_path.glob("kept")] == written


def comparable(seen):
    return re.sub(rb"0x[0-9a-f]+", b"0x", seen) if isinstance(seen, bytes) else seen


async def test_worker_does_not_get_signals_from_before_it_was_one(node, tmp_path):
    """Slurm signals every process of a step, including idle forks: a fork that becomes a worker later gets no signal
    from before."""
    argv = [sys.executable, "-c", "import signal; print(signal.sigpending())"]
    assert (await node.warm(argv, [], cwd=tmp_path, ahead=1))[0] == "ready"
    async with asyncio.timeout(60):
        while not (waiting := node.waiting()):  # noqa: ASYNC110  the kernel sends no event
            await asyncio.sleep(0)
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
        send_all(waiting, number)
    assert (await node.run(argv, cwd=tmp_path, warm=True))[:4] == (0, None, None, b"set()\n")


SEEDING = """
import os, random
{seed}
OWN, FIXED = random.Random(), random.Random(5)
FORKS = []
os.register_at_fork(after_in_child=lambda: FORKS.append(os.getpid()))
"""
DRAWING = """
import json, multiprocessing, os, random, secrets, seeding, tempfile, time, uuid
from logging import _startTime
print(json.dumps({
    "random": random.random(), "own": seeding.OWN.random(), "fixed": seeding.FIXED.random(),
    "uuid4": str(uuid.uuid4()), "uuid1": str(uuid.uuid1()), "secrets": secrets.token_hex(), "file": tempfile.mktemp(),
    "authkey": multiprocessing.current_process().authkey.hex(), "process": str(os.getpid()), "start": _startTime,
    "forks": seeding.FORKS == [os.getpid()],
}))
"""
IMPORTED = ("random", "multiprocessing", "tempfile", "uuid", "secrets", "logging", "seeding")


@pytest.mark.parametrize("seed", ["", "random.seed(3)", "from random import seed; seed(a=3)"])
async def test_warm_siblings_draw_different_random_numbers(node, tmp_path, seed):
    """Warm siblings draw different random numbers, as cold ones do, except from generators that a module seeded with
    a number. Hooks of os.register_at_fork run once."""
    (tmp_path / "seeding.py").write_text(SEEDING.format(seed=seed))
    (tmp_path / "train.py").write_text(DRAWING)
    argv = [sys.executable, "train.py"]
    cold = json.loads((await node.run(argv, cwd=tmp_path, warm=False))[3])
    assert (await node.warm(argv, IMPORTED, cwd=tmp_path, ahead=2))[::2] == ("ready", ANY)
    before = time.time()
    warm = [json.loads(each[3]) for each in await node.run_all(argv, cwd=tmp_path, warm=True, ranks=range(4))]
    fixed = {"fixed", "random"} if seed else {"fixed"}
    for name in cold.keys() - {"forks", "start"}:
        numbers = [cold[name], *(each[name] for each in warm)]
        assert len(set(numbers)) == (1 if name in fixed else len(numbers)), name
    assert all(each["forks"] for each in warm)
    assert all(each["start"] >= before for each in warm)


async def test_setup_may_leave_a_file_open_for_reading(node, tmp_path):
    """A file that the setup leaves open for reading, as under an mmap of weights, has a position of its own in each
    worker."""
    (tmp_path / "weights").write_bytes(bytes(range(256)))
    (tmp_path / "preparing.py").write_text(
        "import mmap\ndef prepare():\n    global FILE, MAP\n    FILE = open('weights', 'rb', buffering=0)\n"
        "    FILE.read(2)\n    MAP = mmap.mmap(FILE.fileno(), 0, access=mmap.ACCESS_READ)\n"
    )
    argv = [sys.executable, "-c", "import preparing as p; print(p.FILE.read(2), p.MAP[-1])"]
    assert (await node.warm(argv, [], cwd=tmp_path, setup="preparing:prepare"))[0] == "ready"
    for each in await node.run_all(argv, cwd=tmp_path, warm=True, ranks=range(3)):
        assert each[3:5] == (b"b'\\x02\\x03' 255\n", b"")


REFUSED = {
    "sys.path.insert(0, '/before')": "puts /before at the front of sys.path",
    "KEPT = open('/etc/hostname')": "leaves /etc/hostname open",
    "threading.Thread(target=threading.Event().wait, daemon=True).start()": "starts 1 thread",
    "KEPT = os.pipe()": "leaves pipe:",
    "KEPT = select.epoll()": "leaves anon_inode:[eventpoll] open",
    "os.environ.setdefault('MASTER_ADDR', 'localhost')": "reads MASTER_ADDR",
    "KEPT = os.environ.get('RANK')": "reads RANK",
    "KEPT = 'LOCAL_RANK' in os.environ": "reads LOCAL_RANK",
}


@pytest.mark.parametrize("line", REFUSED)
async def test_module_that_no_fork_may_inherit_is_refused(node, tmp_path, line):
    """The refusal names the module and the reason."""
    (tmp_path / "bad.py").write_text(f"import os, select, sys, threading\n{line}\n")
    said = await node.warm([sys.executable, "-c", "pass"], ["json", "bad"], cwd=tmp_path)
    assert said[:2] == ("refused", "bad")
    assert REFUSED[line] in said[2]


async def test_objects_are_not_asked_for_their_class(node, tmp_path):
    """The search for numpy's generators among all objects does not access their `__class__`: some of torch's print a
    warning then."""
    kept = (
        "class Kept:\n    @property\n    def __class__(self):\n        print('asked', flush=True)\n\nKEPT = Kept()\n"
    )
    (tmp_path / "kept.py").write_text(kept)
    argv = [sys.executable, "-c", "import kept"]
    assert (await node.warm(argv, ["numpy.random", "kept"], cwd=tmp_path))[0] == "ready"
    assert (await node.run(argv, cwd=tmp_path, warm=True))[3:5] == (b"", b"")
