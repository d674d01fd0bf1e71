"""Runs first in every Python process of a worker: its stacks can be had from outside, and its exceptions are heard.

Put on PYTHONPATH by `diagnostics/stacks/environment.py`. It registers faulthandler for a real-time signal, wraps
`sys.excepthook`, and hands over to the `sitecustomize` that it hides. Whatever is wrong, it neither raises nor
prints: then the process simply goes without. Every interpreter that a worker starts reads this file, so it is written
in the syntax that all of them have, Python 2 too (hence types in comments), and imports next to nothing.
"""

import os
import sys

HIGH_DESCRIPTOR = 1000  # above those that programs count on, or close in a loop; below the usual limit of 1024
LONGEST_WORD_BYTES = 512


def install():
    # type: () -> None
    """Answer the signal, from now on and in children made by fork; tell of an uncaught exception."""
    signum, folder = int(os.environ["NVRX_DUMP_SIGNAL"]), os.environ["NVRX_DUMP_DIR"]
    import _signal  # type: ignore[import-not-found]  # `signal` imports enum

    # Once the interpreter ends, faulthandler puts back what it found. A question that comes then must find the
    # signal ignored: its default action is death.
    _signal.signal(signum, _signal.SIG_IGN)
    answer_into_own_file(signum, folder)
    os.register_at_fork(after_in_child=lambda: quietly(answer_into_own_file, signum, folder))
    if os.environ.get("NVRX_BEAT_SOCKET") and os.environ.get("RANK"):
        wrap_excepthook(os.environ["NVRX_BEAT_SOCKET"], os.environ["RANK"])


def quietly(function, *arguments):
    # type: (object, *object) -> None
    """Call it; what goes wrong there is nobody's business."""
    try:  # noqa: SIM105  contextlib is an import that not every process makes
        function(*arguments)  # type: ignore[operator]
    except Exception:
        pass


def answer_into_own_file(signum, folder):
    # type: (int, str) -> None
    """Print all threads' stacks into the file named by this process's id whenever the signal comes.

    After a fork the parent's descriptor stays open: whether its number still means the parent's file, nobody knows.
    """
    import faulthandler
    from fcntl import F_DUPFD_CLOEXEC, fcntl

    path = os.path.join(folder, str(os.getpid()))  # noqa: PTH118  pathlib takes longer to import than all of this
    low = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        high = fcntl(low, F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR)
    except OSError:  # this process may not open as many
        high = low
    else:
        os.close(low)
    faulthandler.register(signum, file=high, all_threads=True, chain=False)


def wrap_excepthook(address, rank):
    # type: (str, str) -> None
    """Tell the agent of the exception that ends this process before the kernel frees its memory, which takes long."""
    previous = sys.excepthook
    if getattr(previous, "tells_agent", False):
        return

    def excepthook(kind, error, traceback):
        # type: (object, object, object) -> None
        quietly(tell_agent, address, rank, kind, error)
        previous(kind, error, traceback)  # type: ignore[arg-type]

    excepthook.tells_agent = True  # type: ignore[attr-defined]
    sys.excepthook = excepthook


def tell_agent(address, rank, kind, error):
    # type: (str, str, type, object) -> None
    """One datagram, `!<rank> <pid> <type>: <first line of the message>`; lost if the agent cannot take it at once."""
    from _socket import AF_UNIX, SOCK_DGRAM, socket

    word = "!{} {} {}: {}".format(rank, os.getpid(), kind.__name__, first_line(error))  # noqa: UP032  Python 2
    data = word.encode("utf-8", "backslashreplace")[:LONGEST_WORD_BYTES]
    channel = socket(AF_UNIX, SOCK_DGRAM)
    try:
        channel.setblocking(False)
        channel.sendto(data.decode("utf-8", "ignore").encode("utf-8"), address)  # whole characters only
    finally:
        channel.close()


def first_line(error):
    # type: (object) -> str
    """The first line of an exception's message; a message that cannot be had is an empty one."""
    try:
        return str(error)[:LONGEST_WORD_BYTES].lstrip().split("\n", 1)[0].rstrip()
    except Exception:
        return ""


def hand_over():
    # type: () -> None
    """Run the `sitecustomize` behind this one as if this were not there; what it raises, `site` deals with."""
    spec = find_hidden()
    if spec is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[__name__] = module
    try:
        spec.loader.exec_module(module)  # type: ignore[attr-defined]
    except BaseException:
        sys.modules.pop(__name__, None)  # as import does with a module that fails
        raise


def find_hidden():
    # type: () -> object
    """The spec of the next `sitecustomize` on sys.path, or None."""
    try:
        finder = sys.modules["_frozen_importlib_external"].PathFinder  # public in importlib, which costs 0.7 ms
        here = os.path.dirname(__file__)  # noqa: PTH120  no pathlib
        return finder.find_spec(__name__, sys.path[sys.path.index(here) + 1 :])
    except Exception:
        return None


if __name__ == "sitecustomize":
    quietly(install)
    hand_over()
