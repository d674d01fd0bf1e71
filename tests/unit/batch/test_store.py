"""When, and how often, the batch host starts a job's store again."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from nvrx_slurm.batch import children, store
from nvrx_slurm.batch.store import STORE_RESTARTS, STORE_STARTS, StoreKeeper
from nvrx_slurm.errors import StoreUnreachable
from nvrx_slurm.journal.folder import LOOPBACK, JobFolder, JobInfo, StoreAddress
from nvrx_slurm.util.processes import send_signal


class DyingStore(StoreKeeper):
    """Each server ends at once; after `most` starts the next one is refused."""

    def __init__(self, folder: Path, most: int) -> None:
        info = JobInfo(job_id="7", name="digits", cluster="local", started_at=0.0)
        super().__init__(JobFolder(folder), info, asked="auto", job="7", token="t")
        self.most, self.starts = most, 0

    async def _start_server(self) -> None:
        if self.starts == self.most:
            raise StoreUnreachable("no more")
        self.starts += 1
        self.process = await asyncio.create_subprocess_exec("/bin/false")


class RecordingStore(StoreKeeper):
    """Real servers, and a record of them."""

    def __init__(self, folder: JobFolder) -> None:
        info = JobInfo(job_id="7", name="digits", cluster="local", started_at=0.0, addr=LOOPBACK)
        super().__init__(folder, info, asked="auto", job="7", token="t")
        self.servers: list[asyncio.subprocess.Process] = []

    async def _announce(self, address: StoreAddress) -> None:
        assert self.process is not None
        self.servers.append(self.process)
        await super()._announce(address)


async def test_server_that_cannot_be_announced_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start uses the same files, so two servers would write to one append-only file."""
    monkeypatch.setattr(store, "READY_S", 0.0)
    monkeypatch.setattr(children, "RESTART_PAUSES_S", (0.0,))
    folder = JobFolder(tmp_path / "job")
    folder.create()
    keeper = RecordingStore(folder)
    await keeper.start()
    try:
        folder.store_path.unlink()
        folder.store_path.mkdir()  # as long as a folder is there, the file cannot be written
        keeper.servers[0].kill()
        with pytest.raises(StoreUnreachable, match="cannot be written"):
            await asyncio.wait_for(keeper.keep(), 60.0)
        assert len(keeper.servers) == 1 + STORE_STARTS
        assert [server.returncode for server in keeper.servers] == [-signal.SIGKILL] * len(keeper.servers)
    finally:
        for server in keeper.servers:
            send_signal(server, signal.SIGKILL)
            await server.wait()


@pytest.mark.parametrize(("stable_s", "starts"), [(60.0, STORE_RESTARTS + 1), (0.0, STORE_RESTARTS + 10)])
async def test_store_is_given_up_after_so_many_failures_in_a_row(
    stable_s: float, starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that runs for long each time may end any number of times in the life of a job."""
    monkeypatch.setattr(store, "STABLE_S", stable_s)
    monkeypatch.setattr(children, "RESTART_PAUSES_S", (0.0,))
    keeper = DyingStore(tmp_path, STORE_RESTARTS + 10)
    await keeper._start_server()
    with pytest.raises(StoreUnreachable):
        await asyncio.wait_for(keeper.keep(), 30.0)
    assert keeper.starts == starts
