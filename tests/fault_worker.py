"""A worker that comes to the test's gate, and then does what its fault is called after.

argv: the gate's port, the fault (several: `first+second`, one in each cycle from the first on), the ranks that have
it (`all`: each, and the last fault in every cycle that follows), and more words.
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
    from nvrx_slurm import workload  # here: most workers need none of it, and start by the dozen

    workload.beat(step=step)


def section(name: str, timeout: float):
    from nvrx_slurm import workload

    return workload.section(name, timeout=timeout)


def wait() -> int:
    """Wait at the gate, for the exit code that the test gives."""
    said = GATE.recv(1)
    return said[0] if said else 9


def wait_quietly(*_: object) -> None:
    while True:
        select.select([], [], [], 1000)


def exits_early() -> int:
    """As a worker does that miscounts its data: the others wait for it for ever."""
    return 0


def ignores_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("deaf")
    wait_quietly()


def leaves_a_daemon() -> int:
    """A process of a session of its own, deaf to SIGTERM, whose parent is gone."""
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
    """It fails while it holds much memory, which the kernel takes some time to free."""
    held = bytearray(1 << 30)
    held[:: resource.getpagesize()] = b"x" * (len(held) // resource.getpagesize())
    raise ValueError("no such layer: 49")


def raises_and_lingers() -> None:
    """It fails, and does not end: something waits for ever at the interpreter's exit."""
    import atexit

    atexit.register(wait_quietly)
    raise ValueError("no such layer: 49")


def runs_out_of_memory() -> None:
    """Its address space is limited, as `ulimit -v` would, and it wants more."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(2 << 30)


def holds_the_gil() -> None:
    """Stuck in native code that does not let other Python threads run."""
    beat(step=7)
    native = ctypes.PyDLL(None)
    while True:
        native.sleep(1000)  # a signal cuts it short


def sleeps_uninterruptibly() -> None:
    """In state D until the child that it starts gets past a FIFO that nobody opens."""
    beat(step=7)
    to_open = (os.POSIX_SPAWN_OPEN, 0, sys.argv[4], os.O_RDONLY, 0)
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[to_open])


def hangs_in_an_outer_section() -> None:
    """The outer section's time is up; the inner one's is not."""
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
    """Enough steps in the first cycle to learn from; in the second it stops after three."""
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
    """Output without an end, a block every few milliseconds."""
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
