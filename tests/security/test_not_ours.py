"""What is not this job's own is not changed: a site's server, another user's process, a folder outside the base."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Callable, Iterator

import pytest
import redis

from nvrx_slurm.clock import SystemClock
from nvrx_slurm.errors import StoreUnreachable
from nvrx_slurm.folder import StoreAddress
from nvrx_slurm.inprocess.exception import StoreError
from nvrx_slurm.inprocess.store.redis import RedisStore
from nvrx_slurm.records import NodeReady
from nvrx_slurm.store.client import Store
from nvrx_slurm.testing.disk import SmallDisk
from nvrx_slurm.threads import in_thread
from nvrx_slurm.transport.asking import Asker
from tests.contract.inprocess_stores import PASSWORD, Valkey, until

LONG_S = 60.0
FACT = NodeReady(seq=1, node="n1", incarnation="i", replica="main-0", cycle=0, port=1)


class Site:
    """A site's own Valkey with an append-only file, on a disk of its own."""

    def __init__(self) -> None:
        self.disk = SmallDisk("size=16m")
        self.server = Valkey(self.disk.path / "valkey")
        self.url = f"redis://127.0.0.1:{self.server.port}"
        self._raw = redis.Redis(port=self.server.port, password=PASSWORD, decode_responses=True)

    def fill(self) -> None:
        """To the last byte, until a write has been refused."""
        self.disk.fill()
        with pytest.raises(redis.ResponseError, match="MISCONF"):
            while True:
                self._raw.set("ballast", "x" * 10_000)

    def refusals(self) -> int:
        """How many commands the server has answered with MISCONF."""
        return int(self._raw.info("errorstats").get("errorstat_MISCONF", {}).get("count", 0))

    def keeps_a_file(self) -> bool:
        return self._raw.config_get("appendonly") == {"appendonly": "yes"}

    def set_user(self, name: str, *rules: str) -> None:
        self._raw.execute_command("ACL", "SETUSER", name, "on", f">{PASSWORD}", *rules)

    def end(self) -> None:
        self._raw.close()
        self.server.end()
        self.disk.close()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.end()


def of_an_agent(site: Site, patience_s: float, user: str = "") -> None:
    """The write of an agent or of the controller."""

    async def write() -> None:
        url = f"redis://{user}127.0.0.1:{site.server.port}"
        address = StoreAddress(url=url, password=PASSWORD, job="j", token="t")
        store = Store(address, clock=SystemClock(), patience_s=patience_s)
        try:
            await store.tell(FACT)
        finally:
            await store.close()

    asyncio.run(write())


def of_an_in_process_group(site: Site, patience_s: float, user: str = "") -> None:
    store = RedisStore(
        url=f"redis://{user}127.0.0.1:{site.server.port}",
        password_file=str(site.server.password_file),
        patience=datetime.timedelta(seconds=patience_s),
    )
    with contextlib.closing(store.connect("group", 0)) as connection:
        connection.append(b"one", 0)


def of_a_payload_directory(site: Site, patience_s: float, user: str = "") -> None:
    asker = Asker(f"redis://{user}127.0.0.1:{site.server.port}", PASSWORD, patience_s=patience_s)
    try:
        asker.ask(["XADD", "topic", "*", "m", "x"])
    finally:
        asker.close()


Write = Callable[..., None]
every_client = pytest.mark.parametrize("write", [of_an_agent, of_an_in_process_group, of_a_payload_directory])


@every_client
def test_a_sites_server_whose_disk_is_full_keeps_its_configuration(site: Site, write: Write) -> None:
    """Its append-only file stays on. The client asks a few times, gives up after its patience, and names the cure."""
    site.fill()
    before = site.refusals()
    with pytest.raises((StoreUnreachable, StoreError), match=r"redis://.* has refused writes .*Free space.*MISCONF"):
        write(site, 1.0)
    assert 3 <= site.refusals() - before <= 20  # it was 5,590 in 3 s
    assert site.keeps_a_file()


@every_client
def test_a_write_goes_on_when_the_sites_disk_has_space_again(site: Site, write: Write) -> None:
    """The wait ends with the reason for it; nothing is lost."""
    site.fill()
    before = site.refusals()
    writing = in_thread(lambda: write(site, LONG_S), "writer")
    until(lambda: site.refusals() > before + 2, "the writer has been refused three times")
    site.disk.free()
    writing.result(LONG_S)
    assert site.keeps_a_file()


@every_client
def test_a_user_who_may_not_write_is_told_at_once(site: Site, write: Write) -> None:
    """NOPERM is one clear error; the patience of a minute is not used."""
    site.set_user("reader", "~*", "+ping", "+xread", "+hello")
    with pytest.raises((StoreUnreachable, StoreError), match=r"refuses us.*ACL"):
        write(site, LONG_S, "reader@")
