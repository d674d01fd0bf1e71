"""Properties of a group's store in Redis: it survives the server's death, it uses a password, and its keys expire."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import pickle
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from nvrx_slurm.errors import StoreUnreachable
from nvrx_slurm.inprocess.exception import OptionError, StoreError
from nvrx_slurm.inprocess.store import Cancelled, Connection
from nvrx_slurm.inprocess.store_redis import KEEP_S, KEPT_BARRIERS, RedisConnection, RedisStore
from nvrx_slurm.lab.faults.disk import SmallDisk
from nvrx_slurm.store.connection import RetryingRedis
from nvrx_slurm.store.job_store import JobStore
from nvrx_slurm.store.keys import InprocessKeys
from nvrx_slurm.util.redis_url import parse_redis_url
from nvrx_slurm.util.threads import in_thread
from tests.contract.inprocess_stores import DEADLINE_S, PASSWORD, TlsRelay, Valkey
from tests.waiting import until

LONG_S = 600.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Valkey]:
    server = Valkey(tmp_path / "valkey")
    yield server
    server.end()


@pytest.fixture
def connection(server: Valkey) -> Iterator[Connection]:
    connection = server.store().connect("group", 0)
    yield connection
    connection.close()


@pytest.fixture
def raw(server: Valkey, connection: Connection) -> Iterator[Any]:
    """A plain client, to look at the keys."""
    with redis.Redis(port=server.port, password=PASSWORD, decode_responses=True) as client:
        yield client


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def blocked_readers(raw: Any) -> int:
    return int(raw.info("clients")["blocked_clients"])


# ---- a server that is killed or stopped


def test_a_server_that_is_killed_is_waited_for_and_has_lost_nothing(server: Valkey, connection: Connection) -> None:
    """Operations wait while the server is down. After its restart it still has all that it had acknowledged."""
    for place in range(100):
        assert connection.append(b"%d" % place, place)
    connection.arrive("ready:0", 3, b"three")
    connection.beat(3, None)
    server.end()
    asked = in_thread(
        lambda: (connection.read(0, 0.0), connection.arrive("ready:0", 4), connection.beat(4, 3)), "ask"
    )
    server.start()
    assert asked.result(DEADLINE_S) == ([b"%d" % place for place in range(100)], 2, 1)


def test_a_reader_that_waits_reads_on_when_its_server_is_back(
    server: Valkey, connection: Connection, raw: Any
) -> None:
    """A blocked read survives the server's restart and misses no entry."""
    reader = server.store().connect("group", 0)
    connection.append(b"one", 0)
    waiting = in_thread(lambda: reader.read(1, LONG_S), "reader")
    until(lambda: blocked_readers(raw) == 1, "the reader to wait")
    server.end()
    server.start()
    assert connection.append(b"two", 1)
    assert waiting.result(DEADLINE_S) == [b"two"]
    reader.close()


def test_a_server_that_is_stopped_for_a_while_is_waited_for(server: Valkey, connection: Connection) -> None:
    """The kernel of a stopped server still accepts connections and commands. A command whose answer came too late has
    counted once."""
    impatient = RedisStore(
        url=f"redis://127.0.0.1:{server.port}",
        password_file=str(server.password_file),
        patience=datetime.timedelta(seconds=0.5),
    ).connect("group", 0)
    server.send(signal.SIGSTOP)
    with pytest.raises(StoreError, match="does not answer"):
        impatient.append(b"one", 0)
    patient = in_thread(lambda: connection.append(b"one", 0), "append")
    server.send(signal.SIGCONT)
    assert patient.result(DEADLINE_S)
    assert impatient.append(b"one", 0)
    assert connection.read(0, 0.0) == [b"one"]
    impatient.close()


def test_a_server_that_stays_away_is_given_up(server: Valkey) -> None:
    """Once the patience is over, the error names the server, and no password."""
    connection = server.store(patience_s=0.1).connect("group", 0)
    server.end()
    for operation in (lambda: connection.beat(0, 0), lambda: connection.read(0, LONG_S)):
        with pytest.raises(StoreError, match=rf"redis://127\.0\.0\.1:{server.port}/0 does not answer") as caught:
            operation()
        assert PASSWORD not in str(caught.value)
    with pytest.raises(StoreError, match="does not answer"):
        server.store(patience_s=0.1).connect("group", 0)
    server.start()
    assert connection.beat(0, 0) == 1
    connection.close()


def test_waiting_for_a_server_that_is_away_can_be_cancelled(server: Valkey, connection: Connection) -> None:
    """A cancelled operation ends without waiting for its patience."""
    connection.append(b"one", 0)
    server.end()
    waiting = in_thread(lambda: connection.read(1, LONG_S), "reader")
    connection.cancel()
    with pytest.raises(Cancelled):
        waiting.result(DEADLINE_S)
    server.start()


def test_waiting_for_a_server_that_never_answers_can_be_cancelled() -> None:
    """A server that accepts connections and sends nothing: already the first operation can be cancelled."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        keys = InprocessKeys("group", 0, job=None)
        connection = RedisConnection((parse_redis_url(url), None), url, keys, patience_s=LONG_S)
        waiting = in_thread(lambda: connection.arrive("ready:0", 0), "rank")
        accepted, _ = silent.accept()
        connection.cancel()
        with pytest.raises(Cancelled):
            waiting.result(DEADLINE_S)
        accepted.close()


def test_a_server_that_has_lost_the_log_is_not_taken_for_a_new_one(connection: Connection, raw: Any) -> None:
    """After a restart without its data, a log that is shorter or has a gap is an error that says so."""
    for place in range(3):
        connection.append(b"%d" % place, place)
    raw.flushall()
    with pytest.raises(StoreError, match=r"has lost the first 3 entries of nvrx:\{group\}:inprocess:0:log"):
        connection.append(b"3", 3)
    raw.xadd("nvrx:{group}:inprocess:0:log", {"m": "5"}, id="6-0")
    with pytest.raises(StoreError, match="has lost the first 3 entries"):
        connection.read(3, 0.0)


# ---- a wait that is cancelled


def test_a_cancelled_reader_leaves_nothing_at_the_server(server: Valkey, connection: Connection, raw: Any) -> None:
    """The server sees the connection end, although a forked child still has the socket open."""
    reader = server.store().connect("group", 0)
    waiting = in_thread(lambda: reader.read(0, LONG_S), "reader")
    until(lambda: blocked_readers(raw) == 1, "the reader to wait")
    before = len(raw.client_list())
    hold, held = os.pipe()
    if (child := os.fork()) == 0:
        os.close(held)
        os.read(hold, 1)
        os._exit(0)
    reader.cancel()
    with pytest.raises(Cancelled):
        waiting.result(DEADLINE_S)
    reader.close()
    until(lambda: len(raw.client_list()) == before - 1, "the server to see it go")
    os.close(held)
    os.close(hold)
    os.waitpid(child, 0)


def test_no_descriptor_is_left(server: Valkey) -> None:
    """A connection that was closed, cancelled or refused leaves no descriptor and no thread."""
    before = descriptors()
    for cut in (False, True):
        connection = server.store().connect("group", 0)
        if cut:
            connection.cancel()
        connection.close()
        connection.close()
    server.password_file.write_text("wrong")
    with pytest.raises(StoreError):
        server.store().connect("group", 0)
    assert descriptors() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nvrx")]


# ---- who may use it


@pytest.mark.parametrize("wrong", ["hunter3", None])
def test_a_refused_password_is_an_immediate_error(server: Valkey, wrong: str | None) -> None:
    """A refusal is not retried, and the message contains no password."""
    server.password_file.write_text(wrong or "")
    url = f"redis://127.0.0.1:{server.port}"
    store = RedisStore(
        url=url, password_file=str(server.password_file) if wrong else None, patience=datetime.timedelta(days=1)
    )
    with pytest.raises(StoreError, match=r"refuses us.*check its password") as caught:
        store.connect("group", 0)
    assert "hunter" not in str(caught.value)


def test_a_new_password_of_the_server_leaves_the_open_connections(server: Valkey, raw: Any) -> None:
    """The password changes while one thread waits on a connection and another connection is open. Further threads
    share that other one. Once no connection is left, the refusal is an error."""
    where = f"redis://127.0.0.1:{server.port}"
    log = logging.getLogger("test")
    client = RetryingRedis((parse_redis_url(where), PASSWORD), where, patience_s=DEADLINE_S, log=log)
    with ThreadPoolExecutor(9) as threads, contextlib.ExitStack() as at_end:
        at_end.callback(client.cancel)  # a thread that still waits would delay the end of a failed test
        waiting = threads.submit(client.ask, ["BLPOP", "list", 0], wait_s=LONG_S)
        until(lambda: blocked_readers(raw) == 1, "the thread to wait")
        client.ask(["PING"])
        raw.config_set("requirepass", "another")
        for each in [threads.submit(client.ask, ["INCR", "count"]) for _ in range(80)]:
            each.result()
        assert client.ask(["GET", "count"]) == [b"80"]
        raw.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(StoreUnreachable) as caught:
            waiting.result()
        assert caught.value.refused


def test_a_user_and_a_database_of_the_url_are_used(server: Valkey, raw: Any) -> None:
    """A site can give each team its own user and database."""
    raw.acl_setuser("team", enabled=True, passwords=[f"+{PASSWORD}"], keys=["nvrx:*"], categories=["+@all"])
    connection = server.store(user="team@", database=3).connect("group", 0)
    connection.append(b"one", 0)
    assert {client["user"] for client in raw.client_list() if client["db"] == "3"} == {"team"}
    assert raw.info("keyspace")["db3"]["keys"] == 1
    raw.acl_setuser("team", commands=["-xadd"])
    with pytest.raises(StoreError, match="refuses us"):
        connection.append(b"two", 1)
    connection.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://h/", "redis://host"),
        ("redis://", "redis://host"),
        ("redis://h:port", "redis://host"),
        ("redis://h/name", "redis://host"),
        ("redis://:hunter2@h", "password_file"),
        ("redis://h/?password=hunter2", "password_file"),
        ("rediss://h/?ssl_cert=x", "ssl_certfile"),
    ],
)
def test_a_url_that_cannot_be_is_refused_before_anything_is_asked(url: str, words: str) -> None:
    """The error lists what is valid, and shows no password."""
    with pytest.raises(OptionError, match=words) as caught:
        RedisStore(url=url)
    assert caught.value.options == ("url",)
    assert "hunter2" not in str(caught.value)


def test_a_store_holds_no_password_and_wants_its_file_private(server: Valkey) -> None:
    """The store object, which the monitor gets too, holds no password. A password file that others can read is
    refused."""
    assert PASSWORD.encode() not in pickle.dumps(server.store())
    server.password_file.chmod(0o644)
    with pytest.raises(OptionError, match=r"/password: password_file: can be read by others") as caught:
        server.store().connect("group", 0)
    assert caught.value.options == ("password_file",)
    server.password_file.unlink()
    with pytest.raises(OptionError, match=r"/password: password_file: cannot be read"):
        server.store().connect("group", 0)
    with pytest.raises(OptionError) as caught:
        RedisStore(password_file="/etc/password")
    assert caught.value.options == ("password_file", "url")


# ---- its keys


def test_every_key_expires_by_itself(connection: Connection, raw: Any) -> None:
    """Each key expires an hour after the last sign of life, whichever ranks die."""
    connection.append(b"one", 0)
    connection.arrive("join", 0, b"x")
    connection.arrive("ready:0", 0, b"x")
    connection.beat(0, None)
    names = ["log", "gates", "beats", "gate:join", "gate:ready:0"]
    keys = raw.keys()
    assert set(keys) == {f"nvrx:{{group}}:inprocess:0:{name}" for name in names}
    assert all(KEEP_S - 60 < raw.ttl(key) <= KEEP_S for key in keys)


def test_a_call_that_goes_on_keeps_its_keys(server: Valkey, raw: Any) -> None:
    """Signs of life renew the expiry of every key. Old barriers are removed, except the first one."""
    keys = InprocessKeys("group", 0, job=None)
    url = f"redis://127.0.0.1:{server.port}"
    connection = RedisConnection((parse_redis_url(url), PASSWORD), url, keys, patience_s=DEADLINE_S, renew_s=0.0)
    connection.append(b"one", 0)
    gates = ["join", *(f"ready:{iteration}" for iteration in range(KEPT_BARRIERS + 5))]
    for barrier in gates:
        connection.arrive(barrier, 0)
    for key in raw.scan_iter():
        raw.expire(key, 60)
    connection.beat(0, None)
    left = raw.keys()
    assert all(raw.ttl(key) > KEEP_S - 60 for key in left)
    assert {key for key in left if ":gate:" in key} == {
        keys.gate(barrier) for barrier in ["join", *gates[-KEPT_BARRIERS:]]
    }
    connection.clear()
    assert raw.keys() == []
    connection.close()


def test_keys_of_a_job_begin_with_its_prefix(server: Valkey, raw: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Without a url, a rank uses the store and the password that its agent names in NVRX_STORE_FILE."""
    told = tmp_path / "store.json"
    told.write_text(
        f'{{"url": "redis://127.0.0.1:{server.port}", "password": "{PASSWORD}", "job": "77", "token": "t"}}'
    )
    monkeypatch.setenv("NVRX_STORE_FILE", str(told))
    connection = RedisStore().connect("77.main-0.0.2", 1)
    connection.append(b"one", 0)
    assert raw.keys() == ["nvrx:{77}:inprocess:77.main-0.0.2:1:log"]
    connection.close()
    told.unlink()
    with pytest.raises(StoreError, match=r"store\.json \(NVRX_STORE_FILE\) cannot be read"):
        RedisStore().connect("77.main-0.0.2", 1)


# ---- what is between a rank and its server


def test_an_embedded_server_whose_disk_is_full_goes_on_in_memory(tmp_path: Path) -> None:
    """A full disk makes the server refuse every write, until the client turns its append-only file off."""
    disk = SmallDisk("size=16m")
    server = Valkey(disk.path / "valkey")
    where = JobStore(url=f"redis://127.0.0.1:{server.port}", password=PASSWORD, job="1")
    keys = InprocessKeys("group", 0, job=None)
    connection = RedisConnection(lambda: where, where.url, keys, patience_s=DEADLINE_S)
    try:
        assert connection.append(b"one", 0)
        disk.fill()
        assert connection.append(b"x" * 100_000, 1)
        assert connection.append(b"three", 2)
        assert len(connection.read(0, 0.0)) == 3
    finally:
        connection.close()
        server.end()
        disk.close()


def test_a_server_behind_tls_is_reached_by_its_certificate(server: Valkey, tmp_path: Path) -> None:
    """A server whose certificate is not trusted gets no connection."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=127.0.0.1"
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate), "-keyout", str(key)]
    subprocess.run([*made.split(), *files], check=True, stderr=subprocess.DEVNULL)
    with TlsRelay(certificate, key, to=server.port) as port:
        url, secret = f"rediss://127.0.0.1:{port}", str(server.password_file)
        connection = RedisStore(url=f"{url}?ssl_ca_certs={certificate}", password_file=secret).connect("group", 0)
        waiting = in_thread(lambda: connection.read(0, LONG_S), "reader")
        writer = server.store().connect("group", 0)
        assert writer.append(b"x" * 100_000, 0)
        assert waiting.result(DEADLINE_S) == [b"x" * 100_000]
        waiting = in_thread(lambda: connection.read(1, LONG_S), "reader")
        connection.cancel()
        with pytest.raises(Cancelled):
            waiting.result(DEADLINE_S)
        with pytest.raises(StoreError, match="certificate is not trusted"):
            RedisStore(url=url, password_file=secret).connect("group", 0)
        for each in (connection, writer):
            each.close()
