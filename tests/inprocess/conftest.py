"""Fixtures for scenarios of in-process restarts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Forks
from tests.inprocess.harness import Group, told_when_failing
from tests.inprocess.script import Script
from tests.inprocess.servers import LIFETIME_S, Valkey

Start = Callable[..., AbstractContextManager[Group]]


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    """A server for all scenarios that leave it in peace; each group has keys of its own."""
    server = Valkey(tmp_path_factory.mktemp("valkey"))
    yield server
    server.end()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Where ranks are forked from: half of the processor time of a short scenario would be their imports."""
    forks = Forks("tests.inprocess.rank", modules=("tests.inprocess.rank", "nvrx_slurm.inprocess.wrap"))
    yield forks
    forks.close()


@pytest.fixture
def start(valkey: Valkey, forks: Forks, tmp_path: Path) -> Start:
    """Starts a group. When the scenario is through, nothing of the group may be left: no process, no file, no key
    that does not expire."""

    valkey.revive()

    @contextlib.contextmanager
    def started(
        ranks: int,
        script: Script | None = None,
        *,
        name: str | None = None,
        variables: Mapping[str, str] | None = None,
        interpreters: bool = False,  # ranks find each other by what the kernel shows of a process's first environment
        **said: Any,
    ) -> Iterator[Group]:
        store = ("RedisStore", {"url": valkey.url})
        script = script or Script(**{"folder": str(tmp_path / "group"), "store": store, **said})
        with told_when_failing(
            Group(script, ranks, forks=None if interpreters else forks, name=name, **(variables or {}))
        ) as group:
            yield group
            for rank in range(ranks):
                group.let_go(rank)
                group.ended(rank)
            group.until_no_process()
            assert group.litter() == []
            keys = valkey.keys(of=group.name)
            assert all(0 <= expires <= LIFETIME_S for expires in keys.values()), keys

    return started
