from __future__ import annotations

import contextlib
import hashlib
import json
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nvrx_slurm.inprocess import abort
from nvrx_slurm.inprocess.abort import AbortTorchDistributed, AbortTransformerEngine
from nvrx_slurm.inprocess.state import FrozenState

STATE = FrozenState(rank=0, world_size=2)
RANK = Path(__file__).with_name("torch_rank.py")
DEADLINE_S = 100.0


def test_without_torch_there_is_nothing_to_abort():
    """A process that has not loaded torch passes, and does not load it."""
    before = "torch" in sys.modules
    assert AbortTorchDistributed()(STATE) is STATE
    assert ("torch" in sys.modules) is before


def test_transformer_engine_is_called_only_if_it_was_imported(monkeypatch: pytest.MonkeyPatch):
    """Its user buffers are destroyed if it was imported; the abort does not import it."""
    assert AbortTransformerEngine()(STATE) is STATE
    destroyed: list[str] = []
    engine = SimpleNamespace(module=SimpleNamespace(base=SimpleNamespace(destroy_ub=lambda: destroyed.append("ub"))))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)  # the real one needs CUDA
    assert AbortTransformerEngine()(STATE) is STATE
    assert destroyed == ["ub"]


def test_connections_that_are_not_gloos_are_left_alone():
    """No connection is cut in a process without Gloo, although an epoll set waits for some."""
    with contextlib.ExitStack() as stack:
        one, other = socket.socketpair()
        watched = stack.enter_context(select.epoll())
        stack.enter_context(one), stack.enter_context(other)
        watched.register(one, select.EPOLLIN)
        assert abort.cut_gloo_connections() is None
        other.sendall(b"ping")
        assert one.recv(4) == b"ping"


def a_connection(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    one = stack.enter_context(socket.create_connection(listener.getsockname()))
    return one, stack.enter_context(listener.accept()[0])


def test_a_busy_loop_is_found_when_it_waits():
    """A thread with the name of Gloo's is busy for a while before it waits for its connection. It reads the end of
    the connection; its peer reads it only when all ranks are out. Until then both can write, and the bytes are
    lost."""
    begun = threading.Event()

    def loop(watched: select.epoll) -> None:
        name_like_gloos()
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)  # longer than one search, and without the GIL
        watched.poll(DEADLINE_S)

    with contextlib.ExitStack() as stack:
        one, other = a_connection(stack)
        watched = stack.enter_context(select.epoll())
        watched.register(one, select.EPOLLIN)
        thread = threading.Thread(target=loop, args=(watched,), daemon=True)
        thread.start()
        assert begun.wait(DEADLINE_S)
        assert abort.cut_gloo_connections() == 1
        thread.join()
        assert one.recv(1) == b""
        one.close()
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1)
        other.sendall(b"ping")
        abort.close_cut_connections()
        assert select.select([other], [], [], DEADLINE_S)[0] == [other]


def test_a_loop_that_spins_is_given_up():
    """It never waits, and the restart does not wait for it."""
    begun, over = threading.Event(), threading.Event()

    def loop() -> None:
        name_like_gloos()
        begun.set()
        while not over.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1000)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        assert begun.wait(DEADLINE_S)
        began_s = time.thread_time()
        assert abort.cut_gloo_connections() is None
        assert time.thread_time() - began_s < abort._LOOKED_FOR_S / 10
    finally:
        over.set()
        thread.join()


def listening(stack: contextlib.ExitStack) -> socket.socket:
    """A listening socket for which a thread with the name of Gloo's waits."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    own, end = (stack.enter_context(each) for each in socket.socketpair())
    watched, begun = stack.enter_context(select.epoll()), threading.Event()
    watched.register(listener, select.EPOLLIN | select.EPOLLET)
    watched.register(own, select.EPOLLIN)

    def loop() -> None:
        name_like_gloos()
        begun.set()
        while own.fileno() not in dict(watched.poll()):
            pass

    thread = threading.Thread(target=loop)
    thread.start()
    stack.callback(thread.join)
    stack.callback(end.sendall, b"end")
    assert begun.wait(DEADLINE_S)
    return listener


def test_peers_of_gloo_that_will_not_connect_are_replaced(monkeypatch: pytest.MonkeyPatch):
    """Connections are made in place of the missing peers: each sends its number and ends. A second call makes none
    before the restart is over."""
    with contextlib.ExitStack() as stack:
        listener = listening(stack)
        for _ in range(2):
            abort.connect_to_gloo(3)
            abort.connect_to_gloo(3)
            for number in range(3):
                with listener.accept()[0] as peer:
                    assert int.from_bytes(peer.recv(9), sys.byteorder) == number
                    assert peer.recv(1) == b""
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()
            listener.setblocking(True)
            abort.close_cut_connections()
        abort.connect_to_gloo(1 << 20)  # more than this process may open
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def name_like_gloos() -> None:
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("gloo_tcp_loop")


STUCK = ("all_reduce", "all_reduce_in_the_second_group", "large_all_gather", "recv", "barrier", "wait_for_async_work")
STORES = ("waits_for_stores", "waits_for_another_server")
OTHERS = ("again_and_again", "others_connections", "reducer_that_ends_last", "both_abort_at_once", "abort_that_hangs")
WAYS = (*STUCK, *STORES, *OTHERS)


@contextlib.contextmanager
def a_rank(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, str(RANK), *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 reports of each way, when rank 1 takes no part. One pair of ranks for all ways, since torch loads
    slowly."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    with a_rank("1", folder, *WAYS), a_rank("0", folder, *WAYS) as rank:
        lines, _ = rank.communicate(timeout=DEADLINE_S)
    return {way: json.loads(line) for way, line in zip(WAYS, lines.splitlines(), strict=False)}


@pytest.mark.torch
@pytest.mark.parametrize("way", STUCK)
def test_a_rank_is_freed_from_a_collective_of_gloo(told: dict[str, Any], way: str):
    """The main thread waits in Gloo for a rank that is alive and silent; when another thread aborts it, it gets a
    RuntimeError, and the process has no group any more."""
    assert told[way]["outcome"].startswith("RuntimeError: ")
    assert (told[way]["aborted"], told[way]["initialized"]) == (["aborted"], False)


@pytest.mark.torch
def test_the_process_can_use_torch_again(told: dict[str, Any]):
    """After an abort a new group works in the same process, ten times in a row."""
    way = told["again_and_again"]
    assert way["outcome"].startswith("RuntimeError: ")
    assert (way["sums"], way["initialized"]) == ([4.0] * 10, False)


@pytest.mark.torch
def test_only_gloos_connections_are_cut(told: dict[str, Any]):
    """A store of torch and a connection of the user's still work after the abort."""
    way = told["others_connections"]
    assert way["outcome"].startswith("RuntimeError: ")
    assert (way["store"], way["socket"]) == ("value", "ping")


@pytest.mark.torch
def test_no_object_of_the_function_has_the_last_reference_to_a_group(told: dict[str, Any]):
    """Otherwise destroying it would wait, with the GIL held, for threads of Gloo, which may wait for the GIL: a
    hang."""
    way = told["reducer_that_ends_last"]
    assert (way["kept"], way["then"]) == (True, 0)


@pytest.mark.torch
def test_an_abort_that_hangs_is_abandoned(told: dict[str, Any]):
    """If a group does not return from its abort, TimeoutError has the number of such groups and of all groups."""
    words = "1 of 3 process groups are not aborted after 0.2 s"
    assert told["abort_that_hangs"] == {"outcome": words, "in time": True}


@pytest.mark.torch
def test_ranks_that_abort_at_once_are_all_freed(told: dict[str, Any]):
    """No rank waits for a send that it began while its peer closed the connection."""
    assert told["both_abort_at_once"] == {"outcomes": ["RuntimeError"] * 20}


@pytest.mark.torch
def test_a_rank_is_freed_from_a_store(told: dict[str, Any]):
    """The rank waits for a key, for a group, or for another client. Afterwards the store answers again, and no
    connection is left open."""
    waits = [text for number in range(1, 5) for text in ("DistNetworkError", f"then {number}")]
    assert told["waits_for_stores"] == {"outcomes": waits, "leaked": 0}


@pytest.mark.torch
def test_a_connection_to_another_server_is_left_alone(told: dict[str, Any]):
    """The server does not answer as a store does."""
    assert told["waits_for_another_server"] == {"outcome": "returned b'ping'"}
