"""A worker that connects to the test's gate, and then does what its fault is named after.

argv: the gate's port, the fault (several: `first+second`, one for each cycle from the first on), the ranks that have
it (`all`: every rank, and the last fault in every further cycle), and the fault's own arguments.
"""

import ctypes
import os
import resource
import select
import signal
import socket
import sys

GATE: socket.socket


def beat(step: int) -> None:
    from nvrx_slurm import workload  # imported here: most workers do not need it, and dozens of them start

    workload.beat(step=step)


def section(name: str, timeout: float):
    from nvrx_slurm import workload

    return workload.section(name, timeout=timeout)


def wait() -> int:
    """Wait at the gate for the exit code that the test sends."""
    said = GATE.recv(1)
    return said[0] if said else 9


def wait_quietly(*_: object) -> None:
    while True:
        select.select([], [], [], 1000)


def exits_early() -> int:
    """As a worker that miscounts its data: the others wait for it forever."""
    return 0


def ignores_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("deaf")
    wait_quietly()


def leaves_a_daemon() -> int:
    """Leave a process with a session of its own that ignores SIGTERM and whose parent has ended."""
    heard, told = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(told, b"%d" % os.getpid())
        wait_quietly()
    os.wait()
    say(f"daemon {os.read(heard, 16).decode()}")
    return wait()


def has_500_children() -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(500):
        if os.fork() == 0:
            wait_quietly()
    say("all there")
    return wait()


def raises_with_a_gigabyte() -> None:
    """Fail while holding a gigabyte of memory, which takes the kernel some time to free."""
    held = bytearray(1 << 30)
    held[:: resource.getpagesize()] = b"x" * (len(held) // resource.getpagesize())
    raise ValueError("no such layer: 49")


def raises_and_lingers() -> None:
    """Fail, but do not end: an atexit handler waits forever."""
    import atexit

    atexit.register(wait_quietly)
    raise ValueError("no such layer: 49")


def runs_out_of_memory() -> None:
    """Ask for more address space than a limit, as of `ulimit -v`, allows."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(2 << 30)


def holds_the_gil() -> None:
    """Hang in native code that does not release the GIL."""
    beat(step=7)
    native = ctypes.PyDLL(None)
    while True:
        native.sleep(1000)  # a signal interrupts the sleep


def sleeps_uninterruptibly() -> None:
    """Stay in state D: the child that it spawns opens a FIFO that has no writer."""
    beat(step=7)
    to_open = (os.POSIX_SPAWN_OPEN, 0, sys.argv[4], os.O_RDONLY, 0)
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[to_open])


def hangs_in_an_outer_section() -> None:
    """The timeout of the outer section has passed; that of the inner one has not."""
    beat(step=7)
    with section("checkpoint", timeout=1.0), section("upload", timeout=1000.0):
        wait_quietly()


def hangs_in_an_inner_section() -> None:
    beat(step=7)
    with section("checkpoint", timeout=1000.0), section("upload", timeout=1.0):
        wait_quietly()


def takes_a_step() -> int:
    beat(step=7)
    say("stepped")
    return wait()


def never_begins() -> None:
    wait_quietly()


def steps_then_learns() -> int:
    """Report enough steps in the first cycle for the controller to learn a timeout; in the second cycle stop after
    three."""
    steps = {"0": 50, "1": 3}.get(os.environ["NVRX_CYCLE"], 0)
    for step in range(1, steps + 1):
        beat(step=step)
    say("stepped")
    return wait()


def prints_and_falls_silent() -> None:
    say("the last word")
    wait_quietly()


def prints_a_gigabyte() -> int:
    block = (b"x" * 1023 + b"\n") * 1024
    for _ in range(1024):
        _write(block)
    return wait()


def prints_one_long_line() -> int:
    for _ in range(100):
        _write(b"y" * (1 << 20))
    _write(b"\n")
    return wait()


def prints_until_told() -> int:
    """Print a block every few milliseconds, without end."""
    while not select.select([GATE], [], [], 0.005)[0]:
        _write((b"z" * 127 + b"\n") * 64)
    return wait()


def well() -> int:
    return wait()


def say(text: str) -> None:
    print(text, flush=True)


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def main() -> int:
    global GATE
    port, fault, ranks = sys.argv[1:4]
    env = os.environ
    GATE = socket.create_connection(("127.0.0.1", int(port)))
    known = [f"{name}={env[name]}" for name in ("RANK", "NVRX_CYCLE", "NVRX_GENERATION", "NVRX_REPLICA", "NVRX_NODE")]
    GATE.sendall("\0".join([f"PID={os.getpid()}", *known]).encode() + b"\n")
    faults, cycle = fault.split("+"), int(env["NVRX_CYCLE"])
    strikes = ranks == "all" or (cycle < len(faults) and env["RANK"] in ranks.split(","))
    code = (globals()[faults[min(cycle, len(faults) - 1)]] if strikes else well)()
    return code if code is not None else 0


if __name__ == "__main__":
    sys.exit(main())
