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
    """A server for all scenarios that do not disturb it; each group has keys of its own."""
    server = Valkey(tmp_path_factory.mktemp("valkey"))
    yield server
    server.end()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """The process from which ranks are forked: importing would take half of the processor time of a short
    scenario."""
    forks = Forks("tests.inprocess.rank", modules=("tests.inprocess.rank", "nvrx_slurm.inprocess.wrap"))
    yield forks
    forks.close()


@pytest.fixture
def start(valkey: Valkey, forks: Forks, tmp_path: Path) -> Start:
    """Starts a group. At the end of the scenario nothing of the group may be left: no process, no file, no key
    without an expiry."""

    valkey.revive()

    @contextlib.contextmanager
    def started(
        ranks: int,
        script: Script | None = None,
        *,
        name: str | None = None,
        variables: Mapping[str, str] | None = None,
        interpreters: bool = False,  # not forked: then /proc shows the environment of each rank, which others read
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
