"""A site's store behind TLS: no client sends a password to a server with the certificate of another host."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

import nvrx_slurm as nv
from nvrx_slurm.api.submission import check_store
from nvrx_slurm.errors import NvrxError, StoreUnreachable
from nvrx_slurm.inprocess.exception import StoreError
from nvrx_slurm.inprocess.store_redis import RedisStore
from nvrx_slurm.jobspec.plan import plan
from nvrx_slurm.journal.folder import StoreAddress
from nvrx_slurm.lab.devcluster.lifecycle import free_ports
from nvrx_slurm.store.client import StoreClient
from nvrx_slurm.store.redis_client import client
from nvrx_slurm.transport import Directory
from nvrx_slurm.util.clock import SystemClock
from tests.waiting import until

PASSWORD = "the password of the site's store"
WRONG, RIGHT = "DNS:other.example", "IP:127.0.0.1"
SECONDS = 30.0


class SiteStore:
    """A real Redis with TLS and a password. `names`: the subjectAltName of its certificate."""

    def __init__(self, folder: Path, names: str) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            (pytest.fail if os.environ.get("CI") else pytest.skip)("install redis-server: `make slurm-packages`")
        self.certificate, key = folder / "site.pem", folder / "site.key"
        words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=site -addext"
        files = [f"subjectAltName={names}", "-keyout", str(key), "-out", str(self.certificate)]
        subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True)
        self.port = free_ports(1)[0]
        self.password_file = folder / "password"
        self.password_file.touch(mode=0o600)
        self.password_file.write_text(PASSWORD)
        self.log = folder / "log"
        lines = ["port 0", f"tls-port {self.port}", "bind 127.0.0.1", "tls-auth-clients no", 'save ""']
        lines += [f"tls-cert-file {self.certificate}", f"tls-key-file {key}", f'requirepass "{PASSWORD}"']
        self._process = subprocess.Popen([binary, "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self._process.stdin is not None
        self._process.stdin.write("\n".join([*lines, ""]).encode())
        self._process.stdin.close()
        until(self._listens, "the server listens")

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), SECONDS):
            return True
        return False

    @property
    def url(self) -> str:
        return f"rediss://127.0.0.1:{self.port}/0?ssl_ca_certs={self.certificate}"

    @property
    def address(self) -> StoreAddress:
        return StoreAddress(url=self.url, password=PASSWORD, job="j", token="t")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def by_thread(site: SiteStore, _: Path) -> None:
    with client(site.address, connect_s=SECONDS, answer_s=SECONDS) as store:
        store.ping()


async def by_agent(site: SiteStore, _: Path) -> None:
    store = StoreClient(site.address, clock=SystemClock(), patience_s=0.0)
    try:
        await store.ping()
    finally:
        await store.close()


def by_rank(site: SiteStore, _: Path) -> None:
    RedisStore(url=site.url, password_file=str(site.password_file)).connect("group", 0).close()


def by_directory(site: SiteStore, _: Path) -> None:
    with Directory(site.url, site.password_file, "j", patience_s=0.0) as directory:
        directory.lookup()


def by_submit(site: SiteStore, folder: Path) -> None:
    (folder / "job.yaml").write_text("name: a\ncommand: [x]\n")
    options = {"store__url": site.url, "store__password_file": str(site.password_file)}
    spec = nv.load_job(folder / "job.yaml", **options)
    check_store(plan(spec, folder=folder, job_file=folder / "job.yaml").store)


CLIENTS: list[Callable[[SiteStore, Path], Any]] = [by_thread, by_agent, by_rank, by_directory, by_submit]


async def tried(connect: Callable[[SiteStore, Path], Any], site: SiteStore, folder: Path) -> None:
    done = connect(site, folder)
    if done is not None:
        await done


@pytest.mark.parametrize("connect", CLIENTS)
async def test_a_certificate_of_another_host_is_refused(tmp_path: Path, connect: Any) -> None:
    """The client trusts the certificate's issuer, but the name is another host's: the client ends the handshake, and
    its error says so."""
    site = SiteStore(tmp_path, WRONG)
    try:
        with pytest.raises((StoreUnreachable, StoreError, redis.ConnectionError)) as refused:
            await tried(connect, site, tmp_path)
        assert "certificate" in str(refused.value)
        assert PASSWORD not in str(refused.value)
        if isinstance(refused.value, NvrxError):
            assert refused.value.exit_code == 69
    finally:
        site.end()


@pytest.mark.parametrize("connect", CLIENTS)
async def test_a_certificate_of_this_host_is_taken(tmp_path: Path, connect: Any) -> None:
    """The same server with its own name in the certificate is accepted. Otherwise the test above would prove
    nothing."""
    site = SiteStore(tmp_path, RIGHT)
    try:
        await tried(connect, site, tmp_path)
    finally:
        site.end()
