"""Which server binary an embedded store runs on. The servers here are scripts that answer as the real ones do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.store.servers import ServerBinary, bundled_binary, find_server

ANSWERS_TLS = "No tls-cert-file configured!"
REDIS, VALKEY = "Redis server v=7.0.15 sha=0:0", "Valkey server v=99.1.0 sha=0:0"


def program(path: Path, version: str, *, tls: bool = False) -> Path:
    """A script that prints this version, and that a test of its TLS support passes or fails."""
    path.parent.mkdir(exist_ok=True)
    says = ANSWERS_TLS if tls else "Failed finding TLS support."
    path.write_text(f'#!/bin/sh\ncase "$1" in --version) echo "{version}";; *) cat >/dev/null; echo "{says}"; esac\n')
    path.chmod(0o755)
    return path


def found(asked: str, folder: Path, *, with_tls: bool = False) -> Path:
    return find_server(asked, with_tls=with_tls, path=str(folder)).path


def test_without_another_the_bundled_one_is_used(tmp_path: Path) -> None:
    """`auto` takes it if PATH has no server, with TLS wanted or not."""
    assert found("auto", tmp_path) == found("auto", tmp_path, with_tls=True) == bundled_binary()


def test_the_bundled_one_is_a_valkey_without_tls() -> None:
    """`auto` relies on this; if the bundled server ever has TLS, docs/decisions/0024 must be reviewed."""
    server = find_server("bundled", with_tls=True)
    assert (server.name, server.has_tls) == ("Valkey", False)
    assert server.version >= (9, 0, 0)


@pytest.mark.parametrize(
    ("version", "tls", "with_tls", "is_taken"),
    [
        (REDIS, True, True, True),
        (REDIS, True, False, False),  # no reason to prefer it to the bundled one
        (REDIS, False, True, False),
        ("Redis server v=99.0.0", False, False, False),  # version numbers of Redis and Valkey cannot be compared
        ("Redis server v=6.2.14", True, True, False),
        ("no server at all", True, True, False),
    ],
)
def test_a_redis_on_path_is_taken_for_its_tls(
    tmp_path: Path, version: str, tls: bool, with_tls: bool, is_taken: bool
) -> None:
    """It is taken only if TLS is wanted and its version is new enough."""
    redis = program(tmp_path / "redis-server", version, tls=tls)
    assert found("auto", tmp_path, with_tls=with_tls) == (redis if is_taken else bundled_binary())


@pytest.mark.parametrize(("version", "is_taken"), [(VALKEY, True), ("Valkey server v=7.2.5", False)])
def test_a_valkey_on_path_is_taken_where_it_is_newer(tmp_path: Path, version: str, is_taken: bool) -> None:
    """It must be newer than the bundled one."""
    valkey = program(tmp_path / "valkey-server", version)
    assert found("auto", tmp_path) == (valkey if is_taken else bundled_binary())


def test_a_named_server_is_used_as_it_is(tmp_path: Path) -> None:
    """It is used even if PATH has another one."""
    named = program(tmp_path / "mine" / "redis-server", REDIS)
    program(tmp_path / "valkey-server", VALKEY, tls=True)
    assert find_server(str(named), with_tls=True, path=str(tmp_path)) == ServerBinary(
        named, "Redis", (7, 0, 15), False
    )


def missing(path: Path) -> None:
    path.unlink()


def not_a_program(path: Path) -> None:
    path.chmod(0o644)


def others_may_write(path: Path) -> None:
    path.chmod(0o757)


def group_may_write(path: Path) -> None:
    path.chmod(0o775)


def of_another_user(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(path, 65534, -1)


def too_old(path: Path) -> None:
    program(path, "Redis server v=6.2.14")


def no_server(path: Path) -> None:
    program(path, "GNU bash, version 5.2")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (missing, os.strerror(errno.ENOENT)),
        (not_a_program, "program"),
        (others_may_write, "other users"),
        (group_may_write, "other users"),
        (of_another_user, "other users"),
        (too_old, "6.2.14"),
        (no_server, "GNU bash, version 5.2"),
    ],
)
def test_a_named_server_that_cannot_be_used_is_one_clear_error(tmp_path: Path, spoil, says: str) -> None:
    """The error names the key and the file, what is wrong, and what is valid."""
    path = program(tmp_path / "redis-server", REDIS)
    spoil(path)
    with pytest.raises(ConfigError, match=says) as caught:
        find_server(str(path), with_tls=False)
    assert caught.value.key == "store.server"
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 2
