"""`TCPStore`: what a group shares, in torch's store of that name, hosted outside of the ranks.

    nvrx/<group>/<call>/log/<place>    an entry; compare-and-set takes a place only if it is free
    …/gate/<barrier>/<member>          a payload; …/<member>/here: how often it has arrived; …/claim: who was first
    …/gate/<barrier>                   how many have arrived; …/<barrier>/who: which, with a comma after each
    …/gates                            the barriers so far, in the same form
    …/beat/<member>                    its heartbeats; …/beats: the members that have sent any, in the same form

A TCPStore keeps nothing on disk: one that is killed has lost the group's log, so no operation waits for it. It has no
passwords. The monitors import torch too, to use it: `RedisStore` needs a tenth of the memory.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.util
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nvrx_slurm.inprocess import environment
from nvrx_slurm.inprocess.exception import OptionError, StoreError
from nvrx_slurm.inprocess.own_sockets import duplicate, sockets
from nvrx_slurm.inprocess.store import Cancelled, Connection, Store

BLOCK_S = 5.0  # how long one read waits at the server
_connecting = threading.Lock()


class TCPStore(Store):
    """torch's TCPStore. Without arguments it is the one that torchrun's agent has for its workers; elsewhere, and
    where all ranks are on one host, one that is started for them, and ends after them.

    `host_name`, `port`: a store that another process hosts; not a rank, since any rank may die. `patience`: how long
    it may take to answer. Raises OptionError; connections raise StoreError.
    """

    def __init__(
        self,
        *,
        host_name: str | None = None,
        port: int | None = None,
        patience: datetime.timedelta = datetime.timedelta(seconds=10),
    ) -> None:
        if (host_name is None) != (port is None):
            raise OptionError("TCPStore: host_name and port: give both, or none", "host_name", "port")
        if port is not None and not (isinstance(port, int) and 0 < port < 1 << 16):
            raise OptionError(f"TCPStore: port must be a number from 1 to 65535, not {port!r}", "port")
        self._named = None if host_name is None or port is None else (host_name, port)
        self._patience = patience

    def connect(self, group: str, call: int) -> TCPConnection:
        # First: this import takes seconds, and a keeper ends when no rank connects for that long.
        client = torch_store_class()
        address = self._named or environment.torchrun_store()
        if address is None:
            from nvrx_slurm.inprocess.store_keeper import TORCH, hosted

            address = "127.0.0.1", hosted(TORCH, group, patience_s=self._patience.total_seconds()).port
        return TCPConnection(client, *address, f"nvrx/{group}/{call}/", patience=self._patience)


_only_store = False


def only_store_of_torch() -> None:
    """For a process of this package's own, before the first `torch_store_class`: no other part of torch is used here.
    See docs/decisions/0051-torch-without-its-python.md."""
    global _only_store
    _only_store = True


def torch_store_class() -> Any:
    """torch's class TCPStore. Raises OptionError without torch."""
    try:
        if _only_store and "torch" not in sys.modules and (store := _from_library()) is not None:
            return store
        return importlib.import_module("torch.distributed").TCPStore
    except ModuleNotFoundError as error:
        raise OptionError(f"TCPStore needs torch ({error}): install it, or use RedisStore or FileStore") from None


def _from_library() -> Any | None:
    """The class from torch's C++ library, without torch's Python modules: they take a hundred times as long to import
    as the library to load. None where this torch does not let itself be loaded in that way."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.submodule_search_locations is None:
        return None
    # In the place of the packages whose `__init__` is not to run: the library looks both up by name.
    for name, path in (("torch", ""), ("torch.distributed", "distributed")):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(Path(place) / path) for place in spec.submodule_search_locations]
    try:
        library = importlib.import_module("torch._C")
        library._c10d_init()
        return library._distributed_c10d.TCPStore
    except (ImportError, AttributeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
            del sys.modules[name]
        return None


class TCPConnection(Connection):
    """A client, for one thread; any other may call `cancel`."""

    def __init__(self, client: Any, host: str, port: int, prefix: str, *, patience: datetime.timedelta) -> None:
        self._where, self._prefix = f"{host}:{port}", prefix
        self._cancelled = False
        self._store: Any = None
        self._socket: socket.socket | None = None
        with self._answering():
            self._store, self._socket = _connected(client, host, port, patience)

    def append(self, entry: bytes, after: int) -> bool:
        key = self._key("log", after)
        with self._answering() as store:
            self._check_log(store, after)
            return bool(store.compare_set(key, "", entry) == entry)

    def read(self, after: int, wait_s: float) -> list[bytes]:
        deadline, entries = time.monotonic() + wait_s, list[bytes]()
        while True:
            with self._answering() as store:
                self._check_log(store, after)
                while store.check([self._key("log", after + len(entries))]):
                    entries.append(store.get(self._key("log", after + len(entries))))
            left_s = deadline - time.monotonic()
            if entries or left_s <= 0:
                return entries
            with self._answering() as store:
                try:
                    # Not for long: the log may be lost meanwhile, and no entry comes then.
                    store.wait([self._key("log", after)], datetime.timedelta(seconds=min(left_s, BLOCK_S)))
                except RuntimeError as error:
                    if "timeout" not in str(error):
                        raise

    def arrive(self, barrier: str, member: int, payload: bytes = b"") -> int:
        mine = self._key("gate", barrier, member)
        with self._answering() as store:
            store.set(mine, payload)
            if store.add(f"{mine}/here", 1) > 1:
                return int(store.add(self._key("gate", barrier), 0))
            # The member before the count: so a reader of the count finds all members that it counts.
            store.append(self._key("gate", barrier, "who"), f"{member},")
            arrived = int(store.add(self._key("gate", barrier), 1))
            if arrived == 1:
                store.append(self._key("gates"), f"{barrier},")
            return arrived

    def claim(self, barrier: str, member: int, payload: bytes) -> bytes:
        with self._answering() as store:
            # Under a key of its own: one that was only claimed by a process that died then has not arrived.
            first = bytes(store.compare_set(f"{self._key('gate', barrier, member)}/claim", "", payload))
        if first == payload:
            self.arrive(barrier, member, payload)
        return first

    def arrivals(self, barrier: str) -> Mapping[int, bytes]:
        with self._answering() as store:
            members = [int(member) for member in self._listed(self._key("gate", barrier, "who"))]
            payloads = store.multi_get([self._key("gate", barrier, member) for member in members]) if members else []
            return dict(zip(members, payloads, strict=True))

    def arrival(self, barrier: str, member: int) -> bytes | None:
        key = self._key("gate", barrier, member)
        with self._answering() as store:
            return bytes(store.get(key)) if store.check([key]) else None

    def beat(self, member: int, watched: int | None) -> int:
        with self._answering() as store:
            if store.add(self._key("beat", member), 1) == 1:
                store.append(self._key("beats"), f"{member},")
            return 0 if watched is None else int(store.add(self._key("beat", watched), 0))

    def clear(self) -> None:
        with self._answering() as store:
            keys = [self._key("gates"), self._key("beats")]
            place = 0
            while store.check([self._key("log", place)]):
                keys.append(self._key("log", place))
                place += 1
            for barrier in self._listed(self._key("gates")):
                who = self._listed(self._key("gate", barrier, "who"))
                keys += [self._key("gate", barrier), self._key("gate", barrier, "who")]
                keys += [
                    self._key("gate", barrier, member, *here)
                    for member in who
                    for here in ((), ("here",), ("claim",))
                ]
            keys += [self._key("beat", member) for member in self._listed(self._key("beats"))]
            for key in keys:
                store.delete_key(key)

    def cancel(self) -> None:
        self._cancelled = True
        if self._socket is not None:
            # An OSError: the connection has ended by itself.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._store = None  # which closes torch's descriptor
        if self._socket is not None:
            self._socket.close()

    # ---- how

    def _check_log(self, store: Any, after: int) -> None:
        if after and not store.check([self._key("log", after - 1)]):
            raise StoreError(f"the TCPStore at {self._where} has lost {self._prefix}log, of {after} entries")

    def _key(self, *parts: object) -> str:
        return self._prefix + "/".join(map(str, parts))

    @contextlib.contextmanager
    def _answering(self) -> Iterator[Any]:
        """Yields the client. Raises Cancelled, and StoreError for what torch raises, which is a RuntimeError."""
        if self._cancelled:
            raise Cancelled
        try:
            yield self._store
        except RuntimeError as error:
            if self._cancelled:
                raise Cancelled from None
            raise StoreError(f"the TCPStore at {self._where} does not answer: {str(error).splitlines()[0]}") from None

    def _listed(self, key: str) -> list[str]:
        return str(self._store.get(key), "utf-8").split(",")[:-1] if self._store.check([key]) else []


def _connected(
    client_class: Any, host: str, port: int, patience: datetime.timedelta
) -> tuple[Any, socket.socket | None]:
    """A client, and its socket. torch does not give access to it: it is the new socket that leads to that port."""
    with _connecting:
        before = sockets()
        client = client_class(host, port, is_master=False, wait_for_workers=False, timeout=patience)
        for name, descriptor in sockets().items():
            if name in before or (connection := duplicate(descriptor)) is None:
                continue
            # One of these errors: it is no TCP socket.
            with contextlib.suppress(OSError, IndexError, TypeError):
                if connection.getpeername()[1] == port:
                    return client, connection
            connection.close()
    return client, None
