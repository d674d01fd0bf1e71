"""A job goes on after any failure of its own attribution service."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.batch.children import ManagedService
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.util.processes import is_alive
from tests.unit.core.fleet import plain
from tests.waiting import async_until

WITHIN_S = 30.0


class Scripted(ManagedService):
    """Runs a script in place of the service; the script's argument is the file for the port."""

    def __init__(self, folder: JobFolder, script: str) -> None:
        super().__init__(plain(), folder, {})
        self.script, self.ends = script, 0

    def _argv(self) -> list[str]:
        return [sys.executable, "-c", self.script, str(self._port_path)]

    async def _run_once(self) -> None:
        try:
            await super()._run_once()
        finally:
            self.ends += 1


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    folder = JobFolder(tmp_path / "42")
    folder.create()
    return folder


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("print('listening', flush=True); import time; time.sleep(99)", id="reports no port"),
        pytest.param("print('x' * 200_000)", id="prints too much"),
        pytest.param("raise SystemExit(3)", id="ends"),
    ],
)
async def test_a_service_that_is_no_use_is_started_again(folder: JobFolder, script: str) -> None:
    """No failure of the service ends the task that keeps it, and with it the job."""
    service = Scripted(folder, script)
    keeping = asyncio.create_task(service.keep())
    await async_until(lambda: keeping.done() or service.ends == 2)
    assert not keeping.done()
    keeping.cancel()
    await asyncio.wait([keeping])
    assert service.process is not None
    await asyncio.wait_for(service._end(), WITHIN_S)
    assert not is_alive(service.process.pid)


async def test_a_service_that_cannot_be_started_now_is_started_later(
    folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11 waits for each child process in a thread, and the process may be unable to start another one."""

    def no_thread() -> list[str]:
        raise RuntimeError("can't start new thread")

    service = Scripted(folder, "")
    monkeypatch.setattr(service, "_argv", no_thread)
    keeping = asyncio.create_task(service.keep())
    await async_until(lambda: keeping.done() or service.ends == 2)
    assert not keeping.done()
    keeping.cancel()
    await asyncio.wait([keeping])


async def test_a_folder_that_takes_no_file_is_survived(folder: JobFolder) -> None:
    """A file that cannot be written, as on a full disk, does not end the task either."""
    service = Scripted(folder, "")
    service._token_path.mkdir()
    keeping = asyncio.create_task(service.keep())
    await async_until(lambda: keeping.done() or service.ends == 1)
    assert not keeping.done()
    keeping.cancel()
    await asyncio.wait([keeping])


async def test_the_address_is_that_of_this_service_or_none(folder: JobFolder) -> None:
    """A service that ran before, on another host, may have left its address: the token must not be sent there."""
    folder.service_path.write_text("{}")
    script = "import sys, time; time.sleep(0.2); open(sys.argv[1], 'w').write('4711'); print(1, flush=True)"
    script += "; time.sleep(99)"
    service = Scripted(folder, script)
    keeping = asyncio.create_task(service.keep())
    await async_until(lambda: service.process)
    assert not folder.service_path.exists()
    await async_until(folder.service_path.exists)
    assert msgspec.json.decode(folder.service_path.read_bytes())["url"] == "http://127.0.0.1:4711"
    keeping.cancel()
    await asyncio.wait([keeping])
    await asyncio.wait_for(service._end(), WITHIN_S)
    service.clear_away()
    assert not folder.service_path.exists()
