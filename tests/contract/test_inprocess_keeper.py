"""The store that is started for ranks on one host: who starts it, what it survives, and when it ends."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nvrx_slurm.inprocess import store_keeper
from nvrx_slurm.inprocess.exception import OptionError, StoreError
from nvrx_slurm.inprocess.store import Connection
from nvrx_slurm.inprocess.store_keeper import TORCH, VALKEY, HostedStore, hosted
from nvrx_slurm.inprocess.store_keeper_process import KeptValkey, keep
from nvrx_slurm.inprocess.store_redis import RedisStore
from nvrx_slurm.inprocess.store_tcp import TCPStore
from nvrx_slurm.store.link import open_socket
from nvrx_slurm.util.processes import is_alive
from tests.contract.inprocess_stores import DEADLINE_S
from tests.waiting import until

GROUP = "a group"
ASK = f"""
from nvrx_slurm.inprocess import store_keeper
from pathlib import Path
import sys
store_keeper.RUNTIME_ROOTS = (Path(sys.argv[1]),)
print(store_keeper.hosted("valkey", {GROUP!r}, patience_s=10.0).keeper)
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which keepers have theirs. This process is rank 0 of 2, both on this host. Afterwards all keepers
    are killed."""
    monkeypatch.setattr(store_keeper, "RUNTIME_ROOTS", (tmp_path,))
    for name in ("MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "NVRX_STORE_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    yield tmp_path
    for folder in tmp_path.glob("nvrx-inprocess-*/*"):
        if (place := store_keeper._read(folder)) is not None:
            os.kill(place.keeper, signal.SIGKILL)


@pytest.fixture
def connection() -> Iterator[Connection]:
    connection = RedisStore().connect(GROUP, 0)
    yield connection
    connection.close()


def place() -> HostedStore:
    return hosted(VALKEY, GROUP, patience_s=10.0)


def folder() -> Path:
    return store_keeper._folder(VALKEY, GROUP)


def server_of(place: HostedStore) -> int:
    """The process of a keeper's server."""
    return int(Path(f"/proc/{place.keeper}/task/{place.keeper}/children").read_text().split()[0])


def test_all_who_ask_at_once_have_the_same_one(root: Path) -> None:
    """Threads and processes that ask at the same time all get the same store: only one of them starts it."""
    processes = [
        subprocess.Popen([sys.executable, "-c", ASK, str(root)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    with ThreadPoolExecutor(4) as threads:
        told = {threads.submit(place).result().keeper for _ in range(4)}
    told |= {int(process.communicate()[0]) for process in processes}
    assert len(told) == 1


def test_groups_have_stores_of_their_own(connection: Connection) -> None:
    """Two groups have two stores: neither sees the other's entries."""
    other = RedisStore().connect("another group", 0)
    assert other.append(b"one", 0)
    assert connection.read(0, 0.0) == []
    assert hosted(VALKEY, "another group", patience_s=10.0).keeper != place().keeper
    other.close()


def test_it_is_no_child_of_the_rank_and_survives_the_signals_of_a_step(connection: Connection) -> None:
    """The keeper has a session of its own. The signals that Slurm sends to every process of a step end neither it nor
    its server."""
    assert connection.append(b"one", 0)
    kept, server = place().keeper, server_of(place())
    assert os.getsid(kept) != os.getsid(0)
    parent = int(Path(f"/proc/{kept}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent != os.getpid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        for process in (kept, server):
            os.kill(process, number)
    assert connection.append(b"two", 1)
    assert is_alive(kept)
    assert server_of(place()) == server


def test_a_server_that_is_killed_is_started_again_with_what_it_had(connection: Connection) -> None:
    """Connected clients wait until the server is back, with its data."""
    assert connection.append(b"one", 0)
    os.kill(server_of(place()), signal.SIGKILL)
    assert connection.append(b"two", 1)
    assert connection.read(0, 0.0) == [b"one", b"two"]


def test_a_keeper_that_is_killed_leaves_no_server(root: Path) -> None:
    """Its server ends with it, and the next keeper, even of another group, removes its folder."""
    first, left = place(), folder()
    server = server_of(first)
    os.kill(first.keeper, signal.SIGKILL)
    until(lambda: not is_alive(server), "the server's end")
    assert left.exists()
    hosted(VALKEY, "another group", patience_s=10.0)
    assert not left.exists()
    assert place().keeper != first.keeper


def test_what_it_holds_is_its_owners_alone() -> None:
    """The password is in a file of mode 0600, in folders of mode 0700, and in no command line and no environment."""
    kept, where = place(), folder()
    assert [path.stat().st_mode & 0o777 for path in (where.parent, where, where / "place.json")] == [
        0o700,
        0o700,
        0o600,
    ]
    assert kept.password is not None
    for process in (kept.keeper, server_of(kept)):
        for file in ("cmdline", "environ"):
            assert kept.password.encode() not in Path(f"/proc/{process}/{file}").read_bytes()


def test_nothing_of_the_start_is_left_in_the_rank() -> None:
    """Starting the keeper leaves the rank no descriptor and no child."""
    before = descriptors_and_children()
    place()
    assert descriptors_and_children() == before


def descriptors_and_children() -> tuple[set[str], set[str]]:
    """Of this process. Other tests leave it children that serve the whole test run."""
    children = {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}, children


@pytest.mark.parametrize("ranks", [0, 2])
async def test_it_ends_when_its_last_rank_has_gone(tmp_path: Path, ranks: int) -> None:
    """The keeper stops its server once the last rank has disconnected, or when no rank ever connects. First it
    removes the file that announces the server's address."""
    store, told = KeptValkey(tmp_path), tmp_path / "place.json"
    keeping = asyncio.create_task(keep(store, tmp_path, look_s=0.02))
    await asyncio.to_thread(until, told.exists, "the place")
    was = store.place()
    clients = [open_socket(was, DEADLINE_S) for _ in range(ranks)]
    assert store.connections() == ranks
    for client in clients:
        assert not keeping.done()
        client.close()
    await asyncio.wait_for(keeping, DEADLINE_S)
    assert not told.exists()
    with pytest.raises((ConnectionRefusedError, FileNotFoundError)):
        open_socket(was, DEADLINE_S)


def test_nothing_of_it_is_left(connection: Connection) -> None:
    """A few seconds after the last rank has disconnected, keeper, server and folder are gone. A rank that comes back
    gets a new keeper at once."""
    first = place()
    server = server_of(first)
    connection.close()
    until(lambda: not folder().exists(), "the end of the keeper's folder")
    until(lambda: not is_alive(first.keeper) and not is_alive(server), "the end of the keeper")
    assert place().keeper != first.keeper


def test_a_folder_that_others_can_enter_is_passed_over(root: Path) -> None:
    """Other users could have put files there. The next name is used, and kept even when the first one is free
    again."""
    first = root / f"nvrx-inprocess-{os.geteuid()}"
    first.mkdir()
    first.chmod(0o755)
    assert folder().parent == root / f"{first.name}.1"
    first.rmdir()
    assert folder().parent == root / f"{first.name}.1"
    first.symlink_to(root)
    assert folder().parent == root / f"{first.name}.1"


def test_where_all_names_are_taken_the_error_says_by_whom(root: Path) -> None:
    """After a bounded number of names the error says who owns them, and what to set instead."""
    for number in range(store_keeper.MOST_FOLDERS):
        (root / f"nvrx-inprocess-{os.geteuid()}{f'.{number}' if number else ''}").write_bytes(b"")
    with pytest.raises(StoreError, match=rf"must be a folder of user {os.geteuid()}.*\.15; they belong to.*'url'"):
        place()


def test_ranks_of_several_hosts_must_name_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error lists the ways to name one."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(OptionError, match=r"'url'.*FileStore.*nvrx-slurm"):
        RedisStore().connect(GROUP, 0)


def test_a_keeper_that_cannot_start_says_why() -> None:
    """Its own error message is in the error, and the caller does not wait for the timeout."""
    folder().mkdir()
    (folder() / "store").write_text("in the way")
    with pytest.raises(StoreError, match=r"no store could be started (?s:.*)File exists"):
        place()


BESIDE_A_RANK = """
import sys
from nvrx_slurm.inprocess import store_tcp
store_tcp.only_store_of_torch()
connection = store_tcp.TCPStore(host_name="127.0.0.1", port=int(sys.argv[2])).connect(sys.argv[1], 0)
print(connection.read(0, 0.0), connection.append(b"two", 1), connection.claim("runs", 0, b"me"))
print([name for name in sys.modules if name.startswith("torch.")])
connection.close()
"""


@pytest.mark.torch
def test_a_monitor_uses_torchs_store_without_torchs_modules() -> None:
    """Importing torch's modules would take ten times as long as using the store, and as much memory again."""
    rank = TCPStore().connect(GROUP, 0)
    assert rank.append(b"one", 0)
    port = hosted(TORCH, GROUP, patience_s=DEADLINE_S).port
    command = [sys.executable, "-c", BESIDE_A_RANK, GROUP, str(port)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    answers, modules = done.stdout.splitlines()
    assert answers == "[b'one'] True b'me'"
    assert not {"torch.nn", "torch.cuda", "torch.distributed.distributed_c10d"} & set(ast.literal_eval(modules))
    assert rank.read(1, 0.0) == [b"two"]
    rank.close()


@pytest.mark.torch
def test_it_hosts_torchs_store_too() -> None:
    """The keeper also hosts torch's store, in a process that is none of the ranks."""
    rank, other = TCPStore().connect(GROUP, 0), TCPStore().connect(GROUP, 0)
    assert rank.append(b"one", 0)
    assert other.read(0, 0.0) == [b"one"]
    rank.close()
    other.close()
