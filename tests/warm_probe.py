# ruff: noqa: PTH109, PTH115, PTH123, PTH208
"""A worker that reports all it can see of itself. `test_warm_equality.py` starts it cold and warm, in many forms.

It reads /proc without pathlib: it imports only what it inspects (hence the codes above).
"""

import ctypes
import gc
import inspect
import json
import locale
import os
import pickle
import re
import resource
import signal
import stat
import sys
import threading
import traceback
import warnings

# imports


class Example:
    """A class of `__main__`, which multiprocessing pickles."""

    field = 7


def example_function():
    return Example()


def look():
    seen = {}
    libc = ctypes.CDLL(None)
    # The interpreter and its command
    for name in (
        "argv",
        "orig_argv",
        "path",
        "executable",
        "_base_executable",
        "prefix",
        "base_prefix",
        "exec_prefix",
    ):
        seen["sys." + name] = getattr(sys, name, None)
    for name in (
        "version",
        "dont_write_bytecode",
        "pycache_prefix",
        "warnoptions",
        "_xoptions",
        "byteorder",
        "maxsize",
    ):
        seen["sys." + name] = getattr(sys, name, None)
    seen["flags"] = repr(sys.flags)
    seen["meta_path"] = [repr(each) for each in sys.meta_path]
    seen["path_hooks"] = [repr(each) for each in sys.path_hooks]
    seen["hooks"] = [repr(hook) for hook in (sys.excepthook, sys.unraisablehook, sys.displayhook, sys.breakpointhook)]
    seen["trace"] = [repr(sys.gettrace()), repr(sys.getprofile()), repr(threading.gettrace())]
    seen["limits"] = [sys.getrecursionlimit(), sys.getswitchinterval(), sys.get_int_max_str_digits()]
    seen["gc"] = [gc.get_threshold(), gc.isenabled(), [repr(each) for each in gc.callbacks], gc.get_debug()]
    seen["warnings"] = [
        [each[0], repr(each[1]), each[2].__name__, repr(each[3]), each[4]] for each in warnings.filters
    ]
    seen["locale"] = [locale.setlocale(locale.LC_ALL), locale.getlocale(), sys.getfilesystemencoding()]
    seen["site"] = {name: repr(value) for name, value in vars(sys.modules["site"]).items() if name[0] != "_"}
    seen["sys names"] = sorted(vars(sys))
    seen["builtins"] = sorted(vars(sys.modules["builtins"]))
    seen["sitecustomize"] = sorted(vars(sys.modules["sitecustomize"]))
    # The program
    main = sys.modules["__main__"]
    seen["main"] = {name: shape(value) for name, value in vars(main).items()}
    seen["main class"] = pickle.dumps(Example()).hex() + Example.__module__
    try:
        seen["source"] = inspect.getsource(example_function)
        seen["source file"] = [inspect.getsourcefile(example_function), inspect.getfile(Example)]
    except (OSError, TypeError) as error:
        seen["source"] = repr(error)
    seen["stack"] = [[each.filename, each.lineno, each.function] for each in inspect.stack()]
    seen["print_stack"] = traceback.format_stack()
    seen["modules"] = {name: simple(vars(module)) for name, module in list(sys.modules.items()) if name != "__main__"}
    seen["hash"] = hash("x") if os.environ.get("PYTHONHASHSEED") else None
    # Streams
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        seen[name] = [
            *(stream.encoding, stream.errors, stream.line_buffering, stream.write_through, stream.newlines),
            *(stream.isatty(), stream.seekable(), stream.fileno(), stream.name, stream.mode, type(stream).__name__),
            *(
                type(stream.buffer).__name__,
                getattr(stream.buffer, "raw", stream.buffer).name,
                sys.__dict__["__" + name + "__"] is stream,
            ),
        ]
    # The process
    seen["environment"] = list(os.environ.items())
    environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
    count = next(at for at in range(100_000) if environ[at] is None)
    seen["environ of C"] = [os.fsdecode(environ[at]) for at in range(count)]
    seen["/proc/self/environ"] = read("/proc/self/environ").split("\0")
    seen["folder"] = [os.getcwd(), os.readlink("/proc/self/cwd"), os.readlink("/proc/self/root")]
    mask = os.umask(0)
    os.umask(mask)
    seen["umask"] = mask
    seen["rlimits"] = {
        name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name[:7] == "RLIMIT_"
    }
    seen["scheduling"] = [sorted(os.sched_getaffinity(0)), os.nice(0), os.sched_getscheduler(0), os.getpriority(0, 0)]
    seen["ionice"] = libc.syscall(252, 1, 0)  # ioprio_get, x86
    seen["oom"] = [
        read("/proc/self/oom_score_adj"),
        read("/proc/self/coredump_filter"),
        read("/proc/self/timerslack_ns"),
    ]
    seen["signals"] = {int(each): repr(signal.getsignal(each)) for each in sorted(signal.valid_signals())}
    status = dict(line.split(":\t", 1) for line in read("/proc/self/status").splitlines() if ":\t" in line)
    wanted = (
        "SigQ",
        "SigPnd",
        "ShdPnd",
        "SigBlk",
        "SigIgn",
        "SigCgt",
        "Threads",
        "Name",
        "Umask",
        "State",
        "TracerPid",
    )
    wanted += ("Uid", "Gid", "FDSize", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs")
    wanted += ("Seccomp", "Speculation_Store_Bypass", "Cpus_allowed", "Mems_allowed", "CoreDumping", "THP_enabled")
    seen["status"] = {
        name: status[name].strip() for name in wanted if name in status and name not in ("SigQ", "FDSize")
    }
    seen["signal mask"] = sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    seen["wakeup"] = signal.set_wakeup_fd(-1)
    seen["timers"] = [
        signal.getitimer(each) for each in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
    ]
    seen["descriptors"] = descriptors()
    pid, ids = os.getpid(), (os.getpid(), os.getpgrp(), os.getsid(0), threading.get_native_id())
    seen["ids are the pid"] = [each == pid for each in ids] + [threading.main_thread().native_id == pid]
    seen["parent"] = os.getppid()
    got = ctypes.c_int()
    prctl = [
        (name, libc.prctl(number, ctypes.byref(got), 0, 0, 0), got.value)
        for name, number in (("pdeathsig", 2), ("subreaper", 37), ("tsc", 25))
    ]
    prctl += [
        (name, libc.prctl(number, 0, 0, 0, 0), 0)
        for name, number in (
            ("dumpable", 3),
            ("securebits", 27),
            ("timerslack", 30),
            ("no_new_privs", 39),
            ("thp", 42),
        )
    ]
    seen["prctl"] = prctl
    for name in ("comm", "cmdline", "cgroup", "loginuid", "personality"):
        seen["/proc/self/" + name] = read("/proc/self/" + name)
    seen["exe"] = os.readlink("/proc/self/exe")
    seen["namespaces"] = {each: os.readlink("/proc/self/ns/" + each) for each in sorted(os.listdir("/proc/self/ns"))}
    seen["threads"] = [os.listdir("/proc/self/task") == [str(pid)], [each.name for each in threading.enumerate()]]
    seen["thread"] = [type(threading.main_thread()).__name__, threading.active_count(), threading.stack_size()]
    seen["children"] = read(f"/proc/self/task/{pid}/children")
    return seen


def read(path):
    try:
        with open(path, errors="surrogateescape") as file:
            return file.read()
    except OSError as error:
        return repr(error.errno)


def descriptors():
    found = {}
    for name in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            kind = stat.S_IFMT(os.fstat(name).st_mode)
            target = os.readlink(f"/proc/self/fd/{name}")
            flags = re.search(r"flags:\s*(\d+)", read(f"/proc/self/fdinfo/{name}")).group(1)
        except OSError:
            continue
        found[name] = [kind, re.sub(r"\d+", "N", target), flags, os.get_inheritable(name)]
    return found


def shape(value):
    text = value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
    return [type(value).__name__, re.sub(r"0x[0-9a-f]+", "0x", str(text))]


def simple(names):
    """A module's names, with the values of plain types, and the type of every other value."""
    plain = (str, bytes, int, float, bool, type(None))
    return {name: repr(value) if type(value) in plain else type(value).__name__ for name, value in names.items()}


def report(seen):
    text = json.dumps(seen, default=repr)
    with open(os.environ["PROBE_REPORT"], "w") as file:
        file.write(text)


if __name__ == "__main__":
    report(look())
