"""Each user of a site's store has an ACL user, with the rule that `nvrx-slurm store acl` prints."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from click.testing import CliRunner
from redis.backoff import NoBackoff
from redis.retry import Retry

from nvrx_slurm.cli import cli
from nvrx_slurm.inprocess.store_redis import RedisConnection
from nvrx_slurm.jobspec.model import StoreSpec
from nvrx_slurm.journal.records import RendezvousClosed
from nvrx_slurm.store.acl import COMMANDS
from nvrx_slurm.store.keys import InprocessKeys, Keys
from nvrx_slurm.transport.directory import Directory
from nvrx_slurm.transport.ref import PayloadRef
from nvrx_slurm.util.job_key import JobKey
from nvrx_slurm.util.redis_url import parse_redis_url
from tests.harness import WAIT_S, gate_plan
from tests.inprocess.servers import Valkey
from tests.slurm_harness import nvrx

ADMIN = "the-administrator's"
PASSWORDS = {"alice": "wonderland", "bob": "builder"}


def client(port: int, user: str) -> Any:
    return redis.Redis(port=port, username=user, password=PASSWORDS.get(user, ADMIN))


# Import what redis-py loads on its first use, as bob may not be able to read this Python installation.
with redis.Redis(port=1, retry=Retry(NoBackoff(), 0)) as unanswered, contextlib.suppress(redis.ConnectionError):
    unanswered.ping()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[int]:
    """The port of a real Valkey in which alice and bob have the printed rules."""
    server = Valkey(tmp_path / "site", ADMIN)
    with client(server.port, "default") as admin:
        for user, password in PASSWORDS.items():
            admin.execute_command(*printed(user).replace(">PASSWORD", f">{password}").split(" "))
    yield server.port
    server.end()


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(cli, ["store", "acl", *arguments])
    assert done.exit_code == 0, done.output
    return done.output.strip()


def denials(port: int) -> list[tuple[str, str, str]]:
    """The commands that the server has refused: user, reason, object."""
    with client(port, "default") as admin:
        log = admin.execute_command("ACL", "LOG")
    return [(str(each["username"]), str(each["reason"]), str(each["object"])) for each in map(_named, log)]


def _named(entry: Any) -> dict[str, Any]:
    if isinstance(entry, dict):
        return {_text(key): _text(value) for key, value in entry.items()}
    return {_text(key): _text(value) for key, value in zip(entry[::2], entry[1::2], strict=True)}


def _text(value: object) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def attack(port: int) -> list[str]:
    """Try all that would harm alice's job or read from it; returns the commands that were not refused."""
    came_through = []
    prefix = "nvrx:{alice/"
    with client(port, "bob") as site:
        for line in (
            f"SET {prefix}x}}:shutdown:0 forged",
            f"XADD {prefix}x}}:inbox * m forged",
            f"XREVRANGE {prefix}x}}:journal + - COUNT 1",
            f"GET {prefix}x}}:epoch",
            f"DEL {prefix}x}}:journal",
            f"UNLINK {prefix}x}}:journal",
            f"EXPIRE {prefix}x}}:journal 1",
            f"EVAL return(redis.call('GET','{prefix}x}}:epoch')) 0",
            "KEYS *",
            "SCAN 0",
            "MONITOR",
            "FLUSHALL",
            "CONFIG SET appendonly no",
            "CONFIG GET requirepass",
            "ACL LIST",
            "CLIENT LIST",
            "CLIENT KILL TYPE normal",
            "SHUTDOWN NOSAVE",
        ):
            try:
                site.execute_command(*line.split(" "))
            except redis.exceptions.NoPermissionError:
                continue
            came_through.append(line)
        number = site.script_load(f"return redis.call('GET', '{prefix}x}}:epoch')")
        try:
            site.evalsha(number, 0)
        except redis.exceptions.ResponseError as error:
            if "ACL failure" in str(error) or "NOPERM" in str(error):
                return came_through
            raise
    return [*came_through, "a script"]


def test_a_job_runs_under_its_rule_and_bob_cannot_touch_it(bob, run_local, gate, site, tmp_path):
    """The job includes a restart. The server has refused no command of alice's, and every one of bob's."""
    plan = gate_plan(gate, tmp_path, nodes=1, spares=1, workers=1, heartbeat__interval=0.25)
    plan = msgspec.structs.replace(plan, store=StoreSpec(url=f"redis://alice@127.0.0.1:{site}/0", namespace="alice"))
    job = run_local(plan, env={"NVRX_SLURM_STORE_PASSWORD": PASSWORDS["alice"]})
    gate.wait(1, cycle=0)[0].go(3)
    gate.wait(1, cycle=1)
    address = job.folder.read_store()
    assert address.job.startswith("alice/j1-")
    assert bob.run(attack, site) == []
    gate.wait(1, cycle=1)[0].go()
    assert job.finish() == 0
    assert [closed.cycle for closed in job.said(RendezvousClosed)] == [0, 1]
    assert {user for user, _, _ in denials(site)} == {"bob"}


def test_groups_and_directories_run_under_the_rule(site, tmp_path, monkeypatch):
    """The rule allows each operation of an in-process group's store and of a directory of payloads."""
    url = f"redis://alice@127.0.0.1:{site}/0"
    keys = InprocessKeys("group", 0, job="alice/7-a")
    server = (parse_redis_url(url), PASSWORDS["alice"])
    connection = RedisConnection(server, url, keys, patience_s=WAIT_S, renew_s=0.0, job_key=JobKey("t"))
    connection.ping()
    assert connection.append(b"one", 0)
    assert connection.read(0, 0.0) == [b"one"]
    for gate in ("join", *(f"ready:{number}" for number in range(70))):
        connection.arrive(gate, 0, b"payload")
    assert connection.arrivals("join") == {0: b"payload"}
    assert connection.arrival("join", 0) == b"payload"
    assert connection.beat(0, 0) == 1
    connection.clear()
    connection.close()
    store = {"url": url, "password": PASSWORDS["alice"], "job": "alice/7-a", "token": "t"}
    (tmp_path / "store.json").write_bytes(msgspec.json.encode(store))
    monkeypatch.setenv("NVRX_STORE_FILE", str(tmp_path / "store.json"))
    with Directory() as directory:
        following = directory.follow()
        sent = directory.publish(PayloadRef(node="n1", ring="nvrx-ring-7-9-ab", slot=1, generation=1, size=64))
        assert directory.lookup() == [sent] == following.next()
    assert denials(site) == []


def test_rule_of_one_job_covers_its_keys_alone(tmp_path):
    """For a job that runs already."""
    rule = printed("alice", "--namespace", "team-7")
    assert shlex.split(rule)[:6] == ["ACL", "SETUSER", "alice", "reset", "on", ">PASSWORD"]
    assert "~nvrx:{team-7/*" in rule.split() and "&*" not in rule and "+@" not in rule
    assert Keys("team-7/1-a").inbox.startswith("nvrx:{team-7/")
    assert len(set(COMMANDS)) == len(COMMANDS)


@pytest.mark.parametrize("name", ["a b", "*", "", "alice +@all", "a\nb", "~*", "x" * 65])
def test_name_that_would_change_the_rule_is_refused(name, tmp_path):
    """The command is wrong (exit code 2), and prints no rule that a user could paste."""
    for arguments in (["store", "acl", name], ["store", "acl", "alice", "--namespace", name]):
        done = nvrx(*arguments, cwd=tmp_path, env={})
        assert done.returncode == 2 and "SETUSER" not in done.stdout + done.stderr
