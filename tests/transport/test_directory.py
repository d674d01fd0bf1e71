"""`Directory` on a real Valkey, which is also killed and frozen."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from nvrx_slurm.errors import StoreUnreachable, UsageError
from nvrx_slurm.store import connection
from nvrx_slurm.transport.directory import KEPT_RECORDS, LONGEST_RECORD_BYTES, Directory, Following, Published, pack
from nvrx_slurm.transport.ref import PayloadRef
from tests.inprocess.servers import Valkey
from tests.waiting import until

WAIT_S = 30.0
KEY = "nvrx:{j}:payloads:payloads"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    """One server for all tests of this module."""
    running = Valkey(tmp_path_factory.mktemp("valkey"))
    yield running
    running.end()


@pytest.fixture
def valkey(server: Valkey) -> Valkey:
    """The server, running and empty."""
    server.revive()
    with contextlib.closing(raw(server)) as client:
        client.flushall()
    return server


@pytest.fixture
def directory(valkey: Valkey) -> Iterator[Directory]:
    with Directory(valkey.url, job="j") as opened:
        yield opened


def raw(server: Valkey) -> redis.Redis:
    return redis.Redis(port=server.port)


def ref(number: int) -> PayloadRef:
    return PayloadRef(node="n1", ring="nvrx-ring-7-9-ab", slot=number % 8, generation=number, size=64)


def record(number: int) -> bytes:
    return pack(Published(ref=ref(number), publisher="raw", number=number))


def numbers(found: list[Published]) -> list[int]:
    return [published.ref.generation for published in found]


def take(following: Following, count: int) -> list[int]:
    """Take this many records, in any number of parts."""
    deadline, got = time.monotonic() + WAIT_S, list[int]()
    while len(got) < count:
        assert time.monotonic() < deadline, got
        got += numbers(following.next(timeout_s=1.0))
    return got


def connections(server: Valkey) -> int:
    """The number of connections, without the one that asks."""
    with contextlib.closing(raw(server)) as client:
        return len(client.client_list()) - 1


# ------------------------------------------------------------------------------------------- publish, lookup, follow


def test_what_is_published_is_found_in_order(directory):
    """`lookup` returns all records, or those after a given one, in the order of their publication."""
    published = [directory.publish(ref(number)) for number in range(5)]
    assert directory.lookup() == published
    assert directory.lookup(after=published[2].id) == published[3:]
    assert directory.lookup(after=published[-1].id) == []


def test_topics_are_apart_and_an_unknown_one_is_empty(directory):
    """A record is found in its own topic only."""
    directory.publish(ref(1))
    directory.publish(ref(2), topic="ends")
    assert numbers(directory.lookup()) == [1]
    assert numbers(directory.lookup("ends")) == [2]
    assert directory.lookup("nothing") == []


def test_jobs_are_apart(directory, valkey):
    """Two jobs with one store do not see each other's records."""
    directory.publish(ref(1))
    with Directory(valkey.url, job="other") as other:
        assert other.lookup() == []


def test_a_follower_has_all_from_the_start_or_what_comes_from_now_on(directory):
    """A follower that does not begin at the start misses nothing that is published after `follow` has returned."""
    for number in range(3):
        directory.publish(ref(number))
    whole, rest = directory.follow(), directory.follow(from_start=False)
    for number in range(3, 5):
        directory.publish(ref(number))
    assert take(whole, 5) == [0, 1, 2, 3, 4]
    assert take(rest, 2) == [3, 4]
    assert whole.next(timeout_s=0.0) == rest.next(timeout_s=0.0) == []


def test_a_follower_takes_no_more_than_it_asks_for(directory):
    """It gets the other records later."""
    for number in range(5):
        directory.publish(ref(number))
    following = directory.follow()
    assert [numbers(following.next(2, timeout_s=WAIT_S)) for _ in range(3)] == [[0, 1], [2, 3], [4]]
    with pytest.raises(UsageError, match="at least 1"):
        following.next(0)


def test_a_follower_waits_at_the_server(directory, valkey):
    """A new record wakes the follower. A wait of 1.5 s blocks at the server, in two or three reads, and does not
    poll."""
    following = directory.follow()
    with contextlib.closing(raw(valkey)) as client:
        client.config_resetstat()
        began = time.monotonic()
        assert following.next(timeout_s=1.5) == []
        assert time.monotonic() - began >= 1.5
        assert client.info("commandstats")["cmdstat_xread"]["calls"] <= 3
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(following.next, timeout_s=WAIT_S)
            until(lambda: client.info("clients")["blocked_clients"] == 1)
            directory.publish(ref(7))
            assert numbers(waiting.result(WAIT_S)) == [7]


def test_a_topic_is_trimmed_and_goes_by_itself(directory, valkey):
    """A topic keeps about 65,536 records and expires, so that it does not fill a site's store."""
    with contextlib.closing(raw(valkey)) as client:
        with client.pipeline(transaction=False) as pipeline:
            for number in range(KEPT_RECORDS + 1000):
                pipeline.xadd(KEY, {"m": record(number)})
            pipeline.execute()
        directory.publish(ref(KEPT_RECORDS + 1000))
        kept = client.xlen(KEY)
        assert KEPT_RECORDS <= kept < KEPT_RECORDS + 200
        assert 0 < client.ttl(KEY) <= 86400
    assert numbers(directory.lookup()) == list(range(KEPT_RECORDS + 1001 - kept, KEPT_RECORDS + 1001))


def test_every_reader_keeps_a_topic_alive(directory, valkey):
    """`lookup` and `follow` renew a topic's expiry, so that a late consumer still finds it."""
    directory.publish(ref(1))
    with contextlib.closing(raw(valkey)) as client:
        for look in (directory.lookup, directory.follow):
            client.expire(KEY, 60)
            look()
            assert client.ttl(KEY) > 3600


# ------------------------------------------------------------------------------------------- the store fails


def test_nothing_is_lost_and_nothing_comes_twice_while_the_store_is_away(directory, valkey, caplog):
    """A publisher and a follower wait until the killed store is back. Each logs one line about the outage and one
    about its end."""
    caplog.set_level(logging.INFO, "nvrx.transport")
    following = directory.follow()
    directory.publish(ref(0))
    assert take(following, 1) == [0]
    valkey.kill()
    with ThreadPoolExecutor(2) as pool:
        publishing = pool.submit(directory.publish, ref(1))
        waiting = pool.submit(take, following, 1)
        until(lambda: caplog.text.count("the store does not answer") == 2)
        valkey.start()
        assert publishing.result(WAIT_S).ref == ref(1)
        assert waiting.result(WAIT_S) == [1]
    assert numbers(directory.lookup()) == [0, 1]
    assert caplog.text.count("the store does not answer") == caplog.text.count("the store answers again") == 2


def test_a_follower_returns_in_time_while_the_store_is_away(valkey):
    """`next` returns nothing at its timeout. Once the patience is over, even across several calls, it raises
    StoreUnreachable."""
    with Directory(valkey.url, job="j", patience_s=1.0) as directory:
        following = directory.follow()
        valkey.kill()
        began = time.monotonic()
        assert following.next(timeout_s=0.1) == []
        assert time.monotonic() - began < WAIT_S
        with pytest.raises(StoreUnreachable, match="does not answer"):
            until(lambda: following.next(timeout_s=0.1))
        with pytest.raises(StoreUnreachable, match="does not answer"):
            directory.publish(ref(1))
        assert time.monotonic() - began < WAIT_S


def test_a_frozen_store_blocks_no_reader_and_doubles_no_record(directory, valkey, monkeypatch):
    """The publisher repeats its request to a frozen store, which carries out both when it thaws: a consumer gets the
    record once."""
    monkeypatch.setattr(connection, "ANSWER_S", 0.2)
    with Directory(valkey.url, job="j") as reader:
        freeze_and_thaw(directory, reader, valkey)


def freeze_and_thaw(directory: Directory, reader: Directory, valkey: Valkey) -> None:
    following = reader.follow()
    first = directory.publish(ref(0))
    assert numbers(following.next(timeout_s=WAIT_S)) == [0]
    valkey.send(signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert following.next(timeout_s=0.3) == []
        assert time.monotonic() - began < WAIT_S
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(directory.publish, ref(1))
            with pytest.raises(TimeoutError):
                publishing.result(1.0)
            valkey.send(signal.SIGCONT)
            publishing.result(WAIT_S)
    finally:
        valkey.send(signal.SIGCONT)
    directory.publish(ref(2))
    assert take(following, 2) == [1, 2]
    with contextlib.closing(raw(valkey)) as client:
        until(lambda: client.xlen(KEY) > 3)  # the first request for ref(1) was carried out too
    assert numbers(directory.lookup(after=first.id)) == [1, 2]
    assert following.next(timeout_s=0.0) == []


def test_a_refused_password_is_raised_at_once(valkey, tmp_path):
    """The error does not contain the password."""
    with contextlib.closing(raw(valkey)) as client:
        client.config_set("requirepass", "right")
        try:
            for name, password in (("wrong", "wrong-one\n"), ("right", "right\n")):
                (tmp_path / name).touch(mode=0o600)
                (tmp_path / name).write_text(password)
            with Directory(valkey.url, tmp_path / "wrong", "j") as directory, pytest.raises(StoreUnreachable) as told:
                directory.publish(ref(1))
            assert told.value.refused
            assert "wrong-one" not in str(told.value)
            with Directory(valkey.url, tmp_path / "right", "j") as directory:
                assert directory.lookup() == []
        finally:
            client.config_set("requirepass", "")


def test_what_cannot_be_read_is_skipped_with_one_warning(directory, valkey, caplog):
    """Readers get all records around an item that is no record."""
    following = directory.follow()
    with contextlib.closing(raw(valkey)) as client:
        for fields in (
            {"m": b"\xc1"},
            {"x": "y"},
            {"m": b"\x91" * (LONGEST_RECORD_BYTES + 1)},
            {"m": record(5)[:-1]},
        ):
            directory.publish(ref(1))
            client.xadd(KEY, fields)
        directory.publish(ref(1))
    assert numbers(directory.lookup()) == [1] * 5
    assert take(following, 5) == [1] * 5
    assert [entry.levelname for entry in caplog.records] == ["WARNING"] * 2  # one from each reader


# ------------------------------------------------------------------------------------------- threads, forks, the end


def test_threads_publish_side_by_side(directory):
    """Each record is found once, and those of one thread are in its order."""
    threads, each = 8, 50

    def publish(thread: int) -> None:
        for number in range(each):
            directory.publish(ref(thread * each + number))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(publish, range(threads)))
    got = take(directory.follow(), threads * each)
    assert sorted(got) == list(range(threads * each))
    for thread in range(threads):
        own = [number for number in got if number // each == thread]
        assert own == sorted(own)


def test_a_forked_child_publishes_for_itself(directory):
    """A child has a connection and record numbers of its own: none of its records is taken for one of its
    parent's."""
    following = directory.follow()
    directory.publish(ref(0))
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            for number in range(100, 120):
                directory.publish(ref(number))
            directory.close()
            code = 0
        os._exit(code)
    for number in range(1, 20):
        directory.publish(ref(number))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    directory.publish(ref(20))
    got = take(following, 41)
    assert [number for number in got if number < 100] == list(range(21))
    assert [number for number in got if number >= 100] == list(range(100, 120))


def test_close_wakes_a_waiting_reader_and_leaves_no_connection(valkey):
    """`close` from another thread ends the wait with an error. A second `close` does nothing, and later calls are
    errors."""
    directory = Directory(valkey.url, job="j")
    following = directory.follow()
    ended: list[Exception] = []

    def wait() -> None:
        try:
            following.next(timeout_s=WAIT_S)
        except UsageError as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    with contextlib.closing(raw(valkey)) as client:
        until(lambda: client.info("clients")["blocked_clients"] == 1)
    directory.close()
    directory.close()
    waiting.join(WAIT_S / 3)
    assert [str(error) for error in ended] == ["this Directory is closed"]
    until(lambda: connections(valkey) == 0)
    for use in (directory.lookup, directory.follow, lambda: directory.publish(ref(1))):
        with pytest.raises(UsageError, match="closed"):
            use()


# ------------------------------------------------------------------------------------------- under an agent

WORKER = """
import nvrx_slurm.transport as transport
ref = transport.PayloadRef(node="n3", ring="nvrx-ring-7-9-ab", slot=0, generation=7, size=1)
transport.publish(ref)
[found] = transport.lookup()
assert transport.lookup(after=found.id) == []
print(found.replica, found.node, found.generation, found.cycle, found.ref == ref)
"""


def test_a_worker_needs_no_configuration(valkey, tmp_path):
    """The worker's environment, which its agent sets, has the store's address and the worker's identity."""
    store = tmp_path / "store.json"
    store.write_text(json.dumps({"url": valkey.url, "job": "j", "token": "t", "later": 1}))
    told = {"NVRX_STORE_FILE": store, "NVRX_JOB_ID": "j", "NVRX_REPLICA": "rollout-2", "NVRX_NODE": "n3"}
    environment = os.environ | {name: str(value) for name, value in told.items()}
    done = subprocess.run(
        [sys.executable, "-c", WORKER],
        env=environment | {"NVRX_GENERATION": "1", "NVRX_CYCLE": "4"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "rollout-2 n3 1 4 True\n")
    with contextlib.closing(raw(valkey)) as client:
        assert client.xlen(KEY) == 1
