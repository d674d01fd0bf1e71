"""The warm process: a Python that has imported what workers import, and from which each of them is forked.

The supervisor (`agent/warm.py`) starts it with the workers' own command line, folder and environment, without the
variables that differ from rank to rank. CPython loads `sitecustomize`, and that calls `serve`, before it has looked
at the program to run. So a worker is a fork that *returns* from `serve`: CPython then runs `train.py`, `-m module`,
`-c` or a console script exactly as it would have without this file.

On the socket, each message one datagram of strings, separated by zero bytes:

    supervisor → here    its process id, the rank variables' names, most bytes of memory or 0, setup function or "",
                         module, …
    here → supervisor    ready, number of modules, bytes of memory, module, why it is not there, …
                         refused, module or setup function, why; a new process without it is wanted
                         failed, why
    supervisor → here    fork; with it the new worker's own socket. It may be long before that worker is needed
    worker → supervisor  (on its own socket) pid, process id
    supervisor → worker  folder, NAME=value …; with it stdout and stderr
    worker → supervisor  begun; or stale, file: it has changed since it was imported, and this process ends

A worker is forked twice: the process between the two ends at once, and the supervisor, a subreaper, becomes the
worker's parent. So a worker does not end with the warm process. Standard library only, as little of it as possible.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` imports enum
import ctypes
import os
import sys
from _socket import MSG_DONTWAIT, MSG_PEEK, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

FROM_RANK = "reads {}, which differs from rank to rank"
MESSAGE_BYTES = 4 << 20
PIPE_BYTES = 1 << 20
F_SETPIPE_SZ = 1031
PR_SET_PDEATHSIG = 1
PR_SET_MM, PR_SET_MM_MAP = 35, 14
ORPHANED_S = 10.0
HARMLESS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_libc = ctypes.PyDLL(None)  # it keeps the interpreter's lock: there is nothing to give it to


def serve(descriptors: str) -> None:
    """Import, wait, fork. Returns in each worker; in the warm process itself never."""
    if descriptors == "probe":
        os.write(1, b"nvrx-warm")
        os._exit(0)
    try:
        control, out, err = (int(each) for each in descriptors.split(","))
        for descriptor in (control, out, err):
            os.set_inheritable(descriptor, False)
        channel = socket(fileno=control)
        mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
        for end in (1, 2):
            _quietly(_fcntl, end, F_SETPIPE_SZ, PIPE_BYTES)
        supervisor, rank_variables, most_bytes, setup, *modules = _strings(channel.recv(MESSAGE_BYTES))
        path0 = _path0()
        import atexit
        import gc

        atexit.register(gc.unfreeze)  # as the last of all, or nothing that the modules refer to would be finalized
        initial, end_watch = dict(os.environ), _watch_random()
        with_memory = _limit_memory(int(most_bytes))
        files, reopened, skipped = _warm(channel, set(rank_variables.split()), setup, modules, path0)
        seed_again, changed = end_watch(), _changes(initial)
        with_memory()
        gc.collect()
        gc.freeze()  # or the first collection in each worker would copy every page
        channel.send(_datagram("ready", str(len(sys.modules)), str(_memory_bytes()), *skipped))
        printed = [_drain(out), _drain(err)]
        for descriptor in (out, err):
            os.close(descriptor)
        folder, environment, streams = _next_worker(channel, int(supervisor), files)
    except BaseException as error:
        # Any error: what follows in this process would be the user's program, without its rank.
        _quietly(channel.send, _datagram("failed", _said(error)))
        os._exit(1)
    try:
        for source, target in zip(streams, (0, 1, 2)):  # noqa: B905
            os.dup2(source, target)
            os.close(source)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        _quietly(_show_environment, environment)
        for name, value in changed.items():  # what the modules have set, they would have set here
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for descriptor in reopened:
            _quietly(_reopen, descriptor)
        for target, text in zip((1, 2), printed):  # noqa: B905
            _write(target, text)
        _start_anew(path0)
        _quietly(seed_again)
        _signal.pthread_sigmask(_signal.SIG_SETMASK, mask)
    except BaseException as error:
        _quietly(os.write, 2, ("nvrx-slurm: a warm start failed: " + _said(error) + "\n").encode())
        os._exit(1)


# ------------------------------------------------------------------------------------------------------- warming up


def _warm(
    channel: socket, rank_variables: set[str], setup: str, modules: list[str], path0: str | None
) -> tuple[dict[str, tuple[int, ...]], list[int], list[str]]:
    """Import and set up. Returns what the files of the modules look like, the descriptors that each worker opens
    again, and what could not be imported and why. Ends the process instead, where something was done that no fork may
    inherit."""
    began = _now_ns()
    if path0 is not None:
        sys.path.insert(0, path0)
    main_file = _main_file(path0)
    if main_file is not None:  # libraries look there whether this is an interactive session
        sys.modules["__main__"].__file__ = main_file
    read: set[str] = set()

    class Watched(os._Environ):  # type: ignore[type-arg]
        def __getitem__(self, name: str) -> str:
            if name in rank_variables:
                read.add(name)
            return str(super().__getitem__(name))

        def __contains__(self, name: object) -> bool:
            if name in rank_variables:
                read.add(name)
            return super().__contains__(name)

    before, skipped = _descriptors(), []
    reopened: list[int] = []
    os.environ.__class__ = Watched
    for name in [*modules, setup]:
        if not name:
            continue
        does = "setup " + name if name == setup else "import of " + name
        try:
            _call(name) if name == setup else __import__(name)
        except BaseException as error:
            why = f"{does} fails: {_said(error)}"
            if name == setup:
                _leave(channel, "refused", name, why)
            skipped += [name, why]
        if name == setup:
            reopened = [each for each in map(int, _descriptors()) if str(each) not in before and _is_plain(each)]
            before.update((str(each), os.readlink(f"/proc/self/fd/{each}")) for each in reopened)  # noqa: PTH115
        offence = FROM_RANK.format(min(read)) if read else _offence(before)
        if offence is None and path0 is not None and sys.path[:1] != [path0]:
            offence = f"puts {sys.path[0] if sys.path else 'nothing'} at the front of sys.path"
        if offence:
            _leave(channel, "refused", name, does + " " + offence)
    os.environ.__class__ = os._Environ
    for stream in (sys.stdout, sys.stderr):
        _quietly(stream.flush)
    return _files(began), reopened, skipped


def _limit_memory(most_bytes: int) -> Callable[[], None]:
    """Until what is returned is called, an allocation beyond the limit fails, and with it the warm process."""
    if not most_bytes:
        return lambda: None
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_DATA, before)


def _memory_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  no pathlib
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _call(name: str) -> None:
    """The user's `module:function`."""
    module, _, function = name.partition(":")
    __import__(module)
    found = sys.modules[module]
    for part in function.split("."):
        found = getattr(found, part)
    found()  # type: ignore[operator]


def _path0() -> str | None:
    """What CPython will put at the front of sys.path, or None."""
    if getattr(sys.flags, "safe_path", False) or sys.flags.isolated:
        return None
    if sys.argv[0] == "-c":
        return ""
    if sys.argv[0] == "-m":
        return os.getcwd()  # noqa: PTH109  no pathlib
    program = _program()
    for hook in sys.path_hooks:  # a folder, or an archive, of any name
        try:
            hook(program)
        except ImportError:
            continue
        _forget_path(program)
        return program
    return os.path.dirname(os.path.realpath(program))  # noqa: PTH120


def _program() -> str:
    """The script's path, as CPython makes it absolute: it leaves `..` in it."""
    if sys.version_info < (3, 9):  # noqa: UP036  the user's interpreters
        return sys.argv[0]
    return os.path.join(os.getcwd(), sys.argv[0])  # noqa: PTH109, PTH118  no pathlib


def _main_file(path0: str | None) -> str | None:
    """What `__main__.__file__` will be."""
    if sys.argv[0] == "-c":
        return None
    places, names = [path0 or ""], ["__main__"]
    if sys.argv[0] == "-m":
        if sys.version_info < (3, 10):  # noqa: UP036  there is no sys.orig_argv
            return None
        word = sys.orig_argv[-len(sys.argv)]  # `module`, or `-mmodule`
        names = word.partition("m")[2].split(".") if word[:1] == "-" else word.split(".")
        places = sys.path
    elif path0 != _program():
        return _program()
    # Imports nothing, unlike importlib.util.find_spec.
    finder = sys.modules["_frozen_importlib_external"].PathFinder
    for at, _ in enumerate(names):
        spec = finder.find_spec(".".join(names[: at + 1]), places)
        if spec is None:
            return None
        places = spec.submodule_search_locations or []
    if spec.submodule_search_locations is not None:
        spec = finder.find_spec(".".join([*names, "__main__"]), places)
    return spec.origin if spec is not None else None


def _forget_path(path: str) -> None:
    """An archive may be written again before a worker reads its program from it."""
    sys.path_importer_cache.pop(path, None)
    if "zipimport" in sys.modules:
        sys.modules["zipimport"]._zip_directory_cache.pop(path, None)


def _changes(initial: dict[str, str]) -> dict[str, str | None]:
    """The variables that the modules have set, and those that they have removed: None."""
    changed: dict[str, str | None] = {name: None for name in initial if name not in os.environ}
    changed.update((name, value) for name, value in os.environ.items() if initial.get(name) != value)
    return changed


def _offence(before: dict[str, str]) -> str | None:
    """What this process holds that a fork may not inherit."""
    if _threads() > 1:
        # Libraries that know of forks (OpenBLAS) end their threads before one, and start them again when needed.
        _fork_once()
        if _threads() > 1:
            count = _threads() - 1
            return f"starts {count} thread{'s' if count > 1 else ''}"
    for descriptor, target in _descriptors().items():
        if before.get(descriptor) != target and target not in HARMLESS:
            return f"leaves {target} open"
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return "leaves a process behind"


def _is_plain(descriptor: int) -> bool:
    """Whether this is a regular file, open for reading: under an mmap of weights, say."""
    import stat
    from fcntl import F_GETFL, fcntl

    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) and fcntl(descriptor, F_GETFL) & os.O_ACCMODE == os.O_RDONLY


def _reopen(descriptor: int) -> None:
    """So that this worker has a position in the file of its own."""
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    os.lseek(again, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
    os.dup2(again, descriptor, inheritable=os.get_inheritable(descriptor))
    os.close(again)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def _fork_once() -> None:
    pid = _libc.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:  # noqa: SIM105  as in _quietly
            found[name] = os.readlink("/proc/self/fd/" + name)  # noqa: PTH115
        except OSError:
            pass  # the one with which the folder was read
    return found


def _files(began: int) -> dict[str, tuple[int, ...]]:
    """The modules' files. Of installed packages the folder that holds them: an installation changes that."""
    roots = tuple({os.path.realpath(each) + os.sep for each in (sys.prefix, sys.base_prefix, sys.exec_prefix)})
    found = {sys.executable: _look(sys.executable, 0)}
    for name, module in list(sys.modules.items()):
        if name == "__main__":  # each worker reads the program itself
            continue
        path = getattr(module, "__file__", None)
        if not isinstance(path, str):
            continue
        head, mark, _ = path.partition(os.sep + "site-packages" + os.sep)
        if mark:
            path = head + mark[:-1]
        elif os.path.realpath(path).startswith(roots):
            continue
        while not os.path.exists(path) and os.path.dirname(path) != path:  # noqa: PTH120  in an archive
            path = os.path.dirname(path)  # noqa: PTH120
        if path not in found:
            found[path] = _look(path, began if not mark else 0)
    return found


def _look(path: str, began: int) -> tuple[int, ...]:
    """What changes when a file does. One that was written while it was imported never looks the same again."""
    try:
        seen = os.stat(path)  # noqa: PTH116
    except OSError:
        return ()
    return (seen.st_mtime_ns, seen.st_size, seen.st_ino) if not began or seen.st_mtime_ns < began else (-1,)


# ----------------------------------------------------------------------------------------------------------- forking


def _next_worker(
    channel: socket, supervisor: int, files: dict[str, tuple[int, ...]]
) -> tuple[str, dict[str, str], list[int]]:
    """Fork workers when the supervisor asks for them; returns in each of them, and in no other process."""
    while channel.recv(1, MSG_PEEK):
        between = _libc.fork()  # hooks of os.register_at_fork run in the workers alone
        if between == 0:
            own = _fork_all(channel)
            return _join(own, supervisor, files)
        if os.waitpid(between, 0)[1] != 0:
            break
    os._exit(0)


def _fork_all(channel: socket) -> socket:
    """The process between: fork each worker that is asked for, and end. Returns in each of them."""
    while True:
        try:
            _, rights, _, _ = channel.recvmsg(16, 64, MSG_DONTWAIT)
        except BlockingIOError:
            os._exit(0)
        (own,) = _descriptors_in(rights)
        if os.fork() == 0:
            channel.close()
            return socket(fileno=own)
        os.close(own)


def _join(own: socket, supervisor: int, files: dict[str, tuple[int, ...]]) -> tuple[str, dict[str, str], list[int]]:
    """Become the supervisor's child, and wait until it says who this worker is."""
    os.setsid()
    orphaned = _signal.SIGUSR2  # all signals are blocked; no other process sends it here
    _libc.prctl(PR_SET_PDEATHSIG, int(orphaned), 0, 0, 0)
    if os.getppid() != supervisor:
        _signal.sigtimedwait([orphaned], ORPHANED_S)
    _libc.prctl(PR_SET_PDEATHSIG, int(_signal.SIGKILL), 0, 0, 0)
    if os.getppid() != supervisor:
        os._exit(1)
    _signal.sigtimedwait([orphaned], 0)  # it may have come after the look
    own.send(_datagram("pid", str(os.getpid())))
    data, rights, _, _ = own.recvmsg(MESSAGE_BYTES, 64)
    if not data:
        os._exit(0)
    _forget_signals(supervisor)
    stale = next((path for path, seen in files.items() if _look(path, 0) != seen), None)
    if stale is not None:
        own.send(_datagram("stale", stale))
        os._exit(0)
    own.send(_datagram("begun"))
    own.close()
    folder, *environment = _strings(data)
    variables = dict(each.split("=", 1) for each in environment)
    return folder, variables, [os.open(os.devnull, os.O_RDONLY), *_descriptors_in(rights)]


def _forget_signals(supervisor: int) -> None:
    """Those that came before there was a worker: Slurm signals all processes of a step. Not the supervisor's, which
    may stop the worker already."""
    kept = []
    while (one := _signal.sigtimedwait(_signal.valid_signals(), 0)) is not None:
        if one.si_pid == supervisor:
            kept.append(one.si_signo)
    for number in kept:
        os.kill(os.getpid(), number)


def _descriptors_in(rights: list[tuple[int, int, bytes]]) -> list[int]:
    """Those that a message has brought."""
    ((_, _, packed),) = rights
    return [int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4)]


def _start_anew(path0: str | None) -> None:
    """What a new interpreter would have: its own random numbers, no trace of this file."""
    if path0 is not None:
        if path0 in sys.path:
            sys.path.remove(path0)
        _forget_path(path0)
    sys.modules["__main__"].__dict__.pop("__file__", None)
    modules = sys.modules
    if "threading" in modules:
        _quietly(setattr, modules["threading"].main_thread(), "_native_id", os.getpid())
    if "multiprocessing.process" in modules:
        process = modules["multiprocessing.process"]
        _quietly(setattr, process.current_process(), "authkey", os.urandom(32))
    if "logging" in modules:
        import time

        logging: Any = modules["logging"]
        logging._startTime = time.time_ns() if isinstance(logging._startTime, int) else time.time()
    modules.pop(__name__, None)


def _show_environment(environment: dict[str, str]) -> None:
    """Have /proc/self/environ hold what it would after execve(2). Needs no privilege (prctl(2), PR_SET_MM_MAP)."""
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    _libc.malloc.restype = _libc.sbrk.restype = ctypes.c_void_p
    address = _libc.malloc(ctypes.c_size_t(len(block)))  # for ever
    ctypes.memmove(address, block, len(block))
    with open("/proc/self/stat", "rb") as file:  # noqa: PTH123  no pathlib
        fields = [b"", b"", *file.read().rpartition(b")")[2].split()]
    code, data = fields[25:27], fields[44:46]
    numbers = [*code, *data, fields[46], _libc.sbrk(0), fields[27], *fields[47:49], address, address + len(block), 0]
    # struct prctl_mm_map: then no auxiliary vector, and no other program
    packed = b"".join(int(each).to_bytes(8, sys.byteorder) for each in numbers) + b"\0\0\0\0\xff\xff\xff\xff"
    _libc.prctl(PR_SET_MM, PR_SET_MM_MAP, packed, ctypes.c_ulong(len(packed)), 0)


# ---------------------------------------------------------------------------------------------------- random numbers


def _watch_random() -> Callable[[], Callable[[], None]]:
    """Record from now on which generators are seeded by the system. The first function that is returned ends that,
    and returns another for the workers: each seeds those again, and leaves alone those that were given a number."""
    import random
    import secrets

    shared: Any = random._inst
    by_system: dict[int, random.Random] = {id(shared): shared}
    entropy: set[int] = set()
    seed, seed_shared, randbits = random.Random.seed, random.seed, secrets.randbits

    def watched_seed(self: random.Random, a: Any = None, *arguments: Any, **named: Any) -> None:
        seed(self, a, *arguments, **named)
        if a is None:
            by_system[id(self)] = self
        else:
            by_system.pop(id(self), None)

    def watched_seed_shared(*arguments: Any, **named: Any) -> None:
        watched_seed(shared, *arguments, **named)

    def watched_randbits(k: int) -> int:  # of numpy's SeedSequence
        bits = randbits(k)
        entropy.add(bits)
        return bits

    random.Random.seed = watched_seed  # type: ignore[method-assign]
    random.seed, secrets.randbits = watched_seed_shared, watched_randbits

    def end() -> Callable[[], None]:
        random.Random.seed = seed  # type: ignore[method-assign]
        originals: dict[object, object] = {watched_seed_shared: seed_shared, watched_randbits: randbits}
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is watched_seed_shared or value is watched_randbits:
                    setattr(module, name, originals[value])
        state = None if id(shared) in by_system else shared.getstate()
        numpys = []
        if "numpy.random" in sys.modules:
            import gc

            kind = sys.modules["numpy.random"].BitGenerator
            for each in gc.get_objects():
                # Not isinstance: it asks the object for its `__class__`, at which some of torch's print a warning.
                if issubclass(type(each), kind):
                    source = getattr(each, "seed_seq", None) or getattr(each, "_seed_seq", None)
                    if source is not None and source.entropy in entropy:
                        numpys.append(each)
        torch: Any = sys.modules.get("torch")
        # torch seeds itself with 53 or 64 random bits; a user calls manual_seed with a small number, below 0 perhaps.
        is_torchs = torch is not None and 1 << 32 <= torch.initial_seed() % (1 << 64) < (1 << 64) - (1 << 32)

        def again() -> None:
            for each in by_system.values():
                seed(each)
            if state is not None:  # a hook of os.register_at_fork has seeded it
                shared.setstate(state)
            for bits in numpys:
                bits.__init__()
            if is_torchs:
                torch.default_generator.seed()

        return again

    return end


# ----------------------------------------------------------------------------------------------------------- helpers


def _datagram(*strings: str) -> bytes:
    return b"\0".join(os.fsencode(each.replace("\0", " ")) for each in strings)


def _strings(data: bytes) -> list[str]:
    return [os.fsdecode(each) for each in data.split(b"\0")]


def _leave(channel: socket, *words: str) -> None:
    channel.send(_datagram(*words))
    os.killpg(0, _signal.SIGKILL)  # and with it what the import has started


def _said(error: BaseException) -> str:
    try:
        text = str(error).strip().split("\n")[0]
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _drain(descriptor: int) -> bytes:
    """What was printed meanwhile, which each worker prints too."""
    os.set_blocking(descriptor, False)
    found = b""
    try:
        while True:
            chunk = os.read(descriptor, PIPE_BYTES)
            if not chunk:
                break
            found += chunk
    except BlockingIOError:
        pass
    return found


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _fcntl(descriptor: int, command: int, value: int) -> None:
    from fcntl import fcntl

    fcntl(descriptor, command, value)


def _now_ns() -> int:
    import time

    return time.time_ns()


def _quietly(function: Callable[..., object], *arguments: object) -> None:
    try:  # noqa: SIM105  contextlib is an import that not every process makes
        function(*arguments)
    except Exception:
        pass
