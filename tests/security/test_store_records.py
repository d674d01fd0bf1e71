"""The users of a site's store share one password. Records that bob writes into the keys of alice's job do not affect
it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from nvrx_slurm.jobspec.model import StoreSpec
from nvrx_slurm.journal.records import (
    Assignment,
    ControllerStarted,
    Entry,
    RecordsRefused,
    RendezvousClosed,
    Shutdown,
    WorkerFailed,
    pack,
)
from nvrx_slurm.transport import environment
from tests.harness import gate_plan
from tests.inprocess.servers import Valkey

PASSWORD = "the-password-of-the-site"
OUTSIDE = "../../../../outside"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[int]:
    """The port of a real Valkey whose one password both users have."""
    server = Valkey(tmp_path / "site", PASSWORD)
    yield server.port
    server.end()


def client(port: int) -> Any:
    return redis.Redis(port=port, password=PASSWORD)


# Import what redis-py loads on its first use, as bob may not be able to read this Python installation.
with redis.Redis(port=1, retry=Retry(NoBackoff(), 0)) as unanswered, contextlib.suppress(redis.ConnectionError):
    unanswered.ping()


# ---- what bob does: each function runs as user nobody, and has only the password


def poison(port: int) -> None:
    """Add items that no agent writes to every stream: text that is not UTF-8, missing fields, no record."""
    with client(port) as site:
        [inbox] = site.keys("*:inbox")
        prefix = inbox.removesuffix(b"inbox")
        for stream in (b"inbox", b"beats", b"orders", b"journal"):
            for fields in (
                {"m": b"\x81\xa5event\xa2\xff\xff"},
                {"x": "y"},
                {"who": b"\xff", "m": b"\xff" * 40},
                {"m": ""},
            ):
                site.xadd(prefix + stream, fields)


def forge(port: int) -> None:
    """Add a rendezvous that gives each node rank 0, a failure of rank 0, and the end of the job, to orders and
    journal.

    A signed record is a signature of 16 bytes and the record, so bob can still read it.
    """
    with client(port) as site:
        [inbox] = site.keys("*:inbox")
        prefix = inbox.removesuffix(b"inbox").decode()
        joined = [
            fact
            for _, fields in site.xrange(prefix + "journal")
            if (fact := msgspec.msgpack.decode(readable(fields[b"m"]))["record"])["event"] == "node_joined"
        ]
        closed = RendezvousClosed(
            replica=OUTSIDE, cycle=0, nodes=(), active=1, standby=0, world_size=1, master_addr="bob", master_port=1
        )
        rank_0 = Assignment(
            group_rank=0, first_rank=0, workers=1, world_size=1, group_world_size=1, master_addr="bob", master_port=1,
            role="main",
        )  # fmt: skip
        over = Shutdown(exit_code=3, reason="bob")
        for fact in joined:
            failed = WorkerFailed(
                node=fact["node"],
                incarnation=fact["incarnation"],
                seq=99,
                replica="main-0",
                cycle=0,
                rank=0,
                signal=9,
            )
            site.xadd(inbox, {"m": pack(failed)})
            site.hset(f"{prefix}rendezvous:{OUTSIDE}:0:0", fact["node"], pack(rank_0))
        site.set(f"{prefix}shutdown:0", pack(over))
        number = int(site.get(prefix + "journal_n"))
        site.xadd(prefix + "journal", {"m": pack(Entry(n=number + 1, t=0.0, record=over))})
        for order in (closed, over):
            site.xadd(prefix + "orders", {"m": pack(order)})


def readable(signed: bytes) -> bytes:
    """The record behind the signature, if there is one (a packed map begins with 0x80 or more)."""
    for begins in (0, 16, 24):
        try:
            if isinstance(msgspec.msgpack.decode(signed[begins:]), dict):
                return signed[begins:]
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    raise AssertionError("not even bob can read this")


def copy_all(port: int) -> int:
    """Append a copy of each signed item to its stream. Returns the number of copies."""
    copied = 0
    with client(port) as site:
        [inbox] = site.keys("*:inbox")
        prefix = inbox.removesuffix(b"inbox")
        for stream in (b"inbox", b"orders", b"journal"):
            for _, fields in site.xrange(prefix + stream):
                site.xadd(prefix + stream, fields)
                copied += 1
    return copied


# ---- alice


@pytest.fixture
def job(run_local, gate, site, tmp_path):
    """A job of one rank and one hot spare on the site's store; its worker waits at the gate."""
    plan = gate_plan(gate, tmp_path, nodes=1, spares=1, workers=1, heartbeat__interval=0.25)
    plan = msgspec.structs.replace(plan, store=StoreSpec(url=f"redis://127.0.0.1:{site}/0"))
    job = run_local(plan, env={"NVRX_SLURM_STORE_PASSWORD": PASSWORD})
    gate.wait(1, cycle=0)
    job.agent_pid("n1")
    job.agent_pid("n2")
    return job


def finish(job, gate) -> None:
    """Assert that the job is not disturbed: the worker of cycle 0 ends it with exit code 0."""
    gate.wait(1, cycle=0)[0].go()
    assert job.finish() == 0
    assert [closed.cycle for closed in job.said(RendezvousClosed)] == [0]


def refused(job) -> RecordsRefused:
    return job.expect(RecordsRefused)


def restart_controller(job) -> None:
    os.kill(job.said(ControllerStarted)[-1].pid, signal.SIGKILL)
    job.expect(ControllerStarted, epoch=len(job.said(ControllerStarted)) + 1)


def test_poison_is_set_aside_counted_and_journaled(bob, job, gate, site):
    """One record that is not UTF-8 used to crash the controller again and again. Now it is skipped, and the journal
    counts it."""
    bob.run(poison, site)
    assert refused(job).count >= 1
    restart_controller(job)
    assert len(job.said(ControllerStarted)) == 2
    finish(job, gate)
    log = job.folder.node_log("controller").read_text()
    assert "set aside" in log and "Traceback" not in log
    assert "Traceback" not in job.folder.job_log.read_text()


def test_forged_records_are_ignored(bob, job, gate, site):
    """No agent and no controller acts on bob's rendezvous, failure or shutdown."""
    bob.run(forge, site)
    refused(job)
    restart_controller(job)
    finish(job, gate)
    assert job.said(Shutdown)[0].reason == "done"
    assert not job.said(WorkerFailed)
    said = (job.folder.path / "nodes" / "n2.log").read_text()
    assert "is not signed with this job's key" in said and "Traceback" not in said
    assert not list(job.folder.path.parent.glob("../**/outside*"))


def test_copies_of_signed_records_change_nothing(bob, job, gate, site):
    """Each signed record is valid once, and only in its own place."""
    assert bob.run(copy_all, site) > 0
    refused(job)
    restart_controller(job)
    finish(job, gate)


def test_token_of_payloads_does_not_follow_from_the_password(job, gate, monkeypatch):
    """Every user who has the site's password could derive such a token."""
    import hmac

    monkeypatch.setenv("NVRX_STORE_FILE", str(job.folder.store_path))
    token = environment.token_or_none(None)
    assert token is not None
    for job_id in ("", "j1", json.loads(job.folder.store_path.read_bytes())["job"]):
        purpose = b"nvrx payloads of job " + job_id.encode()
        assert token != hmac.digest(PASSWORD.encode(), purpose, "sha256")
    finish(job, gate)
