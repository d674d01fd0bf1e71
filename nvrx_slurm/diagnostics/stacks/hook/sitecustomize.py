"""Runs first in every Python process of a worker: prints its stacks on a signal, and reports its uncaught exception.

`diagnostics/stacks/hook_client.py` puts it on PYTHONPATH. It registers faulthandler for a real-time signal, wraps
`sys.excepthook`, and then runs the `sitecustomize` that it hides. If anything is wrong, it neither raises nor
prints: the process runs without the hook. It needs Python 3.7. Every interpreter that a worker starts reads this
file: it must parse in older ones too, which then skip it (hence types in comments), and it imports as little as
possible.
"""

import os
import sys

HIGH_DESCRIPTOR = 1000  # above those that programs count on, or close in a loop; below the usual limit of 1024
LONGEST_REPORT_BYTES = 512


def install():
    # type: () -> None
    """Answer the signal, from now on and in children made by fork; report an uncaught exception."""
    if os.environ.get("NVRX_PACKAGES"):  # in a container: `import nvrx_slurm.workload`, where the image has none
        sys.path.append(os.environ["NVRX_PACKAGES"])
    if os.environ.get("NVRX_MODULES_FILE"):
        quietly(record_imports, os.environ.pop("NVRX_MODULES_FILE"))
    signum, folder = int(os.environ["NVRX_DUMP_SIGNAL"]), os.environ["NVRX_DUMP_DIR"]
    import _signal  # type: ignore[import-not-found]  # `signal` imports enum

    # When the interpreter ends, faulthandler restores what it found. A request that arrives then must find the
    # signal ignored: its default action kills.
    _signal.signal(signum, _signal.SIG_IGN)
    answer_into_own_file(signum, folder)
    os.register_at_fork(after_in_child=lambda: quietly(answer_into_own_file, signum, folder))
    if os.environ.get("NVRX_BEAT_SOCKET") and os.environ.get("RANK"):
        wrap_excepthook(os.environ["NVRX_BEAT_SOCKET"], os.environ["RANK"])


def record_imports(path):
    # type: (str) -> None
    """Write down each module that this process looks for, a line each (`imports: auto` of `prewarm`)."""
    pid, descriptor = os.getpid(), os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    class Recorder:
        def find_spec(self, name, path=None, target=None):
            # type: (str, object, object) -> None
            if os.getpid() == pid:
                os.write(descriptor, (name + "\n").encode())

    sys.meta_path.insert(0, Recorder())


def quietly(function, *arguments):
    # type: (object, *object) -> None
    """Call it, and ignore its exceptions."""
    try:  # noqa: SIM105  contextlib is an import that not every process makes
        function(*arguments)  # type: ignore[operator]
    except Exception:
        pass


def answer_into_own_file(signum, folder):
    # type: (int, str) -> None
    """Print all threads' stacks into the file named by this process's id whenever the signal arrives."""
    import faulthandler
    from fcntl import F_DUPFD_CLOEXEC, fcntl

    path = os.path.join(folder, str(os.getpid()))  # noqa: PTH118  pathlib takes longer to import than all of this
    low = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        high = fcntl(low, F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR)
    except OSError:  # the limit of open files is lower
        high = low
    else:
        os.close(low)
    # After a fork the parent's descriptor stays open: the child may have reused its number, so it is not closed.
    faulthandler.register(signum, file=high, all_threads=True, chain=False)


def wrap_excepthook(address, rank):
    # type: (str, str) -> None
    """Report the exception that ends this process before the kernel frees its memory, which takes long."""
    previous = sys.excepthook
    if getattr(previous, "reports_to_agent", False):
        return

    def excepthook(kind, error, traceback):
        # type: (object, object, object) -> None
        # The report has the agent stop this node's workers within a millisecond: without this SIGTERM would end the
        # process before its traceback is printed. A second SIGTERM, or the end of the grace, ends it all the same.
        release = []  # type: list[object]
        quietly(hold_sigterm, release)
        quietly(report_exception, address, rank, kind, error)
        previous(kind, error, traceback)  # type: ignore[arg-type]
        for each in release:
            quietly(each)

    excepthook.reports_to_agent = True  # type: ignore[attr-defined]
    sys.excepthook = excepthook


def hold_sigterm(release):
    # type: (list[object]) -> None
    """From now on the first SIGTERM waits for what is put into `release`; nothing, where the process handles it."""
    import _signal

    if _signal.getsignal(_signal.SIGTERM) != _signal.SIG_DFL:
        return
    arrived = []  # type: list[int]

    def arrive(number, frame):
        # type: (int, object) -> None
        arrived.append(number)
        _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)

    def let_go():
        # type: () -> None
        _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)
        if arrived:
            os.kill(os.getpid(), _signal.SIGTERM)

    _signal.signal(_signal.SIGTERM, arrive)
    release.append(let_go)


def report_exception(address, rank, kind, error):
    # type: (str, str, type, object) -> None
    """One datagram, `!<rank> <pid>@<monotonic seconds> <type>: <first line of the message>`; lost if the agent cannot
    take it at once. Where a lost connection or a RuntimeError was the first of a chain, it is named too: libraries
    wrap what they meet."""
    import time
    from _socket import AF_UNIX, SOCK_DGRAM, socket

    now = time.monotonic()
    first = error
    for _ in range(8):
        hidden = getattr(first, "__suppress_context__", False)
        before = getattr(first, "__cause__", None) or (None if hidden else getattr(first, "__context__", None))
        if before is None:
            break
        first = before
    name = kind.__name__
    if kind.__module__ == "nvrx_slurm.inprocess.exception":  # `cannot_run` must know it from a user's of that name
        name = kind.__module__ + "." + name
    what = "{}: {}".format(name, first_line(error))  # noqa: UP032  must parse in Python 2
    if first is not error and isinstance(first, (ConnectionError, RuntimeError)):
        what += " (after {}: {})".format(type(first).__name__, first_line(first))  # noqa: UP032
    # Where apptainer is the process that the supervisor has started, the agent knows this worker by that one's id.
    pid = os.getppid() if os.environ.get("NVRX_BELOW_RUNTIME") else os.getpid()
    report = "!{} {}@{:.6f} {}".format(rank, pid, now, what)  # noqa: UP032
    data = report.encode("utf-8", "backslashreplace")[:LONGEST_REPORT_BYTES]
    channel = socket(AF_UNIX, SOCK_DGRAM)
    try:
        channel.setblocking(False)
        channel.sendto(data.decode("utf-8", "ignore").encode("utf-8"), address)  # whole characters only
    finally:
        channel.close()


def first_line(error):
    # type: (object) -> str
    try:
        lines = str(error)[:LONGEST_REPORT_BYTES].strip().split("\n")
        while len(lines) > 1 and not lines[0].strip("=-*# "):  # torchrun's ChildFailedError begins with a ruler
            del lines[0]
        return lines[0].rstrip()
    except Exception:  # its own __str__ fails
        return ""


def run_hidden():
    # type: () -> None
    """Run the next `sitecustomize` on sys.path as if this one did not exist; `site` handles what it raises."""
    try:
        finder = sys.modules["_frozen_importlib_external"].PathFinder  # public in importlib, which costs 0.7 ms
        here = os.path.dirname(__file__)  # noqa: PTH120  no pathlib
        spec = finder.find_spec(__name__, sys.path[sys.path.index(here) + 1 :])
    except Exception:
        return
    if spec is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules[__name__] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(__name__, None)  # as import does with a module that fails
        raise


if __name__ == "sitecustomize":
    if sys.version_info >= (3, 7):  # noqa: UP036  the user's interpreters
        if "NVRX_WARM_FD" in os.environ:  # this is no worker: workers are forked from it, and go on here
            try:
                import nvrx_warm  # type: ignore[import-not-found]
            except BaseException:  # without it this process would go on, and run the user's program
                os._exit(1)
            nvrx_warm.serve(os.environ.pop("NVRX_WARM_FD"))
            del nvrx_warm
        quietly(install)
    run_hidden()
