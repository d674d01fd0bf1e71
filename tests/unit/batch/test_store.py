"""How often the batch host starts a job's store again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nvrx_slurm.batch import children, store
from nvrx_slurm.batch.store import STORE_RESTARTS, StoreKeeper
from nvrx_slurm.errors import StoreUnreachable
from nvrx_slurm.journal.folder import JobFolder, JobInfo


class DyingStore(StoreKeeper):
    """Each server ends at once; the start after `most` of them is refused."""

    def __init__(self, folder: Path, most: int) -> None:
        info = JobInfo(job_id="7", name="digits", cluster="local", started_at=0.0)
        super().__init__(JobFolder(folder), info, asked="auto", job="7", token="t")
        self.most, self.starts = most, 0

    async def _start_server(self) -> None:
        if self.starts == self.most:
            raise StoreUnreachable("no more")
        self.starts += 1
        self.process = await asyncio.create_subprocess_exec("/bin/false")


@pytest.mark.parametrize(("stable_s", "starts"), [(60.0, STORE_RESTARTS + 1), (0.0, STORE_RESTARTS + 10)])
async def test_store_is_given_up_after_so_many_failures_in_a_row(
    stable_s: float, starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that had run for long may end any number of times in the life of a job."""
    monkeypatch.setattr(store, "STABLE_S", stable_s)
    monkeypatch.setattr(children, "RESTART_PAUSES_S", (0.0,))
    keeper = DyingStore(tmp_path, STORE_RESTARTS + 10)
    await keeper._start_server()
    with pytest.raises(StoreUnreachable):
        await asyncio.wait_for(keeper.keep(), 30.0)
    assert keeper.starts == starts
