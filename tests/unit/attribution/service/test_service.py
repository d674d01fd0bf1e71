"""The service behind its API, with workers that are real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from nvrx_slurm.attribution.service import workers
from nvrx_slurm.attribution.service.lifecycle import InquiryRecord
from nvrx_slurm.attribution.service.storage import RetentionLimits, StateFolder
from nvrx_slurm.attribution.service.wire import id_of
from tests.unit.attribution.service.conftest import Fleet, ask, until


async def test_terminal(fleet: Fleet) -> None:
    """A terminal inquiry is analysed once, and its answer is final."""
    client = fleet.start()
    inquiry = fleet.inquiry("STOP cuda_oom")
    first = await ask(client, inquiry)
    assert first.status_code == 200
    answer = first.json()
    assert (answer["state"], answer["key"]) == ("done", str(inquiry.key))
    assert (answer["attribution"]["verdict"], answer["attribution"]["fault"]) == ("STOP", "cuda_oom")
    await fleet.write(inquiry, "RESTART")
    assert (await ask(client, inquiry)).json() == answer
    assert (await client.get(f"/v1/inquiries/{answer['id']}")).json() == answer
    assert (await client.get("/v1/stats")).json()["analyses"] == 1


async def test_one_computation(fleet: Fleet) -> None:
    """A hundred requests for one key get the answer of one analysis."""
    client = fleet.start(workers=2)
    inquiry = fleet.inquiry(None)
    asking = [asyncio.create_task(ask(client, inquiry)) for _ in range(100)]
    await until(client, lambda stats: stats["inquiries"]["running"] == 1)
    await fleet.write(inquiry, "RESTART node_lost")
    answers = [(await each).content for each in asking]
    assert len(set(answers)) == 1 and b"RESTART" in answers[0]
    assert (await client.get("/v1/stats")).json()["analyses"] == 1


async def test_poll(fleet: Fleet) -> None:
    """A client that does not wait gets 202 and the state; a long poll ends with the answer."""
    client = fleet.start()
    inquiry = fleet.inquiry(None)
    early = await ask(client, inquiry, wait_s=0)
    assert early.status_code == 202 and early.json()["attribution"] is None
    polling = asyncio.create_task(client.get(f"/v1/inquiries/{id_of(inquiry.key)}?wait=20"))
    await until(client, lambda stats: stats["inquiries"]["running"] == 1)
    assert (await client.get("/v1/inquiries")).json()["inquiries"][0]["key"] == str(inquiry.key)
    await fleet.write(inquiry, "STOP")
    assert (await polling).json()["state"] == "done"
    assert (await client.get("/v1/inquiries")).json() == {"inquiries": [], "total": 0}


async def test_track_only(fleet: Fleet) -> None:
    """An inquiry that is only tracked is analysed once a client wants an answer; that client need not name the paths
    again."""
    client = fleet.start()
    inquiry = fleet.inquiry("STOP import_error")
    tracked = await ask(client, inquiry, "track_only", wait_s=0)
    assert (tracked.status_code, tracked.json()["state"]) == (202, "tracked")
    assert (await client.get("/v1/stats")).json()["analyses"] == 0
    asked = type(inquiry)(key=inquiry.key, paths=())
    assert (await ask(client, asked)).json()["attribution"]["fault"] == "import_error"


async def test_progressive(fleet: Fleet) -> None:
    """A progressive verdict may change while the log grows, and is final once the log is complete."""
    client = fleet.start()
    inquiry = fleet.inquiry("UNKNOWN")
    first = (await ask(client, inquiry, "progressive")).json()
    assert (first["state"], first["attribution"]["verdict"]) == ("tracked", "UNKNOWN")
    await fleet.write(inquiry, "RESTART ecc")
    sharper = (await client.get(f"/v1/inquiries/{first['id']}?wait=20&after={first['revision']}")).json()
    assert (sharper["state"], sharper["attribution"]["verdict"]) == ("tracked", "RESTART")
    await fleet.write(inquiry, "STOP shape")
    last = (await ask(client, inquiry, "progressive", settled=True)).json()
    assert (last["state"], last["attribution"]["verdict"]) == ("done", "STOP")
    await fleet.write(inquiry, "RESTART")
    assert (await ask(client, inquiry, "terminal")).json() == last


async def test_followed_no_longer(fleet: Fleet) -> None:
    """A progressive inquiry that no client settles gets a final answer when it has been followed for long enough."""
    client = fleet.start(bounds=RetentionLimits(followed_for_s=0.1))
    inquiry = fleet.inquiry("RESTART ib")
    await ask(client, inquiry, "progressive")
    await until(client, lambda stats: stats["inquiries"]["done"] == 1)


async def test_worker_hangs(fleet: Fleet) -> None:
    """A worker that hangs past the bound is killed, its inquiry says so, and the next one is analysed."""
    client = fleet.start(timeout_s=4.0)
    hung = (await ask(client, fleet.inquiry(None))).json()
    assert (hung["state"], hung["attribution"]) == ("failed", None)
    assert "hung: it gave no answer within 4 s, and was killed" in hung["problem"]
    assert (await ask(client, fleet.inquiry("STOP", cycle=1))).json()["state"] == "done"


async def test_worker_killed(fleet: Fleet) -> None:
    """A worker that is killed fails its own inquiry, which may be submitted again, and no other."""
    client = fleet.start()
    inquiry = fleet.inquiry(None)
    asking = asyncio.create_task(ask(client, inquiry))
    await until(client, lambda stats: stats["inquiries"]["running"] == 1 and stats["workers"][0]["pid"] is not None)
    os.kill((await client.get("/v1/stats")).json()["workers"][0]["pid"], signal.SIGKILL)
    lost = (await asking).json()
    assert lost["state"] == "failed" and "SIGKILL ended it" in lost["problem"]
    asking = asyncio.create_task(ask(client, inquiry))
    await fleet.write(inquiry, "STOP")
    assert (await asking).json()["attribution"]["verdict"] == "STOP"


async def test_deadly_inquiry(fleet: Fleet) -> None:
    """An inquiry that has killed three workers is not tried a fourth time."""
    client = fleet.start()
    inquiry = fleet.inquiry("die")
    for _ in range(5):
        assert (await ask(client, inquiry)).json()["state"] == "failed"
    stats = (await client.get("/v1/stats")).json()
    assert (stats["workers_lost"], stats["analyses"]) == (3, 3)


async def test_bad_answers(fleet: Fleet) -> None:
    """A worker that answers garbage or has a problem fails the inquiry, and the service goes on."""
    client = fleet.start()
    told = {}
    for cycle, says in enumerate(("garbage", "nested", "problem: no such file", "leave", "STOP")):
        answer = (await ask(client, fleet.inquiry(says, cycle))).json()
        told[says] = (answer["state"], answer["problem"])
    assert told["problem: no such file"] == ("failed", "problem: no such file")
    assert told["leave"] == ("failed", "too much memory")
    assert told["garbage"][0] == "failed" and "malformed" in told["garbage"][1]
    assert told["nested"][0] == "failed" and "recursion" in told["nested"][1]
    assert told["STOP"] == ("done", None)


async def test_worker_cannot_start(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that fails before its program runs fails the inquiry, and the next one gets a new process."""

    def fails() -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(workers, "dies_with_parent", lambda number: fails)
        client = fleet.start()
        answer = (await ask(client, fleet.inquiry("STOP"))).json()
        assert answer["state"] == "failed" and "the worker was lost" in answer["problem"]
    assert (await ask(client, fleet.inquiry("STOP", cycle=1))).json()["state"] == "done"


async def test_queue_is_bounded(fleet: Fleet) -> None:
    """An inquiry that does not fit into the queue is refused with 503 and Retry-After; a known one is not."""
    client = fleet.start(bounds=RetentionLimits(queued=2))
    held = fleet.inquiry(None)
    await ask(client, held, wait_s=0)
    await until(client, lambda stats: stats["inquiries"]["running"] == 1)
    for cycle in (1, 2):
        assert (await ask(client, fleet.inquiry("STOP", cycle), wait_s=0)).status_code == 202
    refused = await ask(client, fleet.inquiry("STOP", 3), wait_s=0)
    assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 1
    assert "2 analyses are queued already" in refused.json()["error"]
    assert (await ask(client, held, wait_s=0)).status_code == 202
    await fleet.write(held, "STOP")
    await until(client, lambda stats: stats["inquiries"]["done"] == 3)


async def test_terminal_goes_first(fleet: Fleet) -> None:
    """A terminal inquiry is analysed before a progressive one."""
    client = fleet.start()
    held, patient, urgent = fleet.inquiry(None), fleet.inquiry(None, 1), fleet.inquiry("STOP", 2)
    await ask(client, held, wait_s=0)
    await until(client, lambda stats: stats["inquiries"]["running"] == 1)
    await ask(client, patient, "progressive", wait_s=0)
    await ask(client, urgent, wait_s=0)
    await fleet.write(held, "STOP")
    assert (await client.get(f"/v1/inquiries/{id_of(urgent.key)}?wait=20")).json()["state"] == "done"
    await fleet.write(patient, "STOP")


async def test_restart(fleet: Fleet) -> None:
    """Answers survive a restart of the service, and the next service analyses what the former one had begun."""
    client = fleet.start(state=True)
    done, held = fleet.inquiry("STOP shape"), fleet.inquiry(None, 1)
    answer = (await ask(client, done)).json()
    await ask(client, held, wait_s=0)
    await until(client, lambda stats: stats["inquiries"]["running"] == 1)
    await fleet.services[0].close()
    await fleet.write(done, "RESTART")
    await asyncio.to_thread(Path(held.paths[0]).unlink)
    await fleet.write(held, "RESTART ecc")
    again = fleet.start(state=True)
    assert (await ask(again, done)).json() == answer
    taken_up = (await again.get(f"/v1/inquiries/{id_of(held.key)}?wait=20")).json()
    assert (taken_up["state"], taken_up["attribution"]["fault"]) == ("done", "ecc")


async def test_end_in_the_middle_of_a_save(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the service ends while it saves the begin of a look, no worker counts as lost, and the inquiry stays
    queued."""
    begins, may_go_on, save = threading.Event(), threading.Event(), StateFolder.save

    def slow(self: StateFolder, identity: str, record: InquiryRecord) -> None:
        if record.state == "running":
            begins.set()
            may_go_on.wait()
        save(self, identity, record)

    monkeypatch.setattr(StateFolder, "save", slow)
    client = fleet.start(state=True)
    await ask(client, fleet.inquiry("STOP"), wait_s=0)
    assert await asyncio.to_thread(begins.wait, 20)
    closing = asyncio.create_task(fleet.services[0].close())
    await asyncio.sleep(0)
    may_go_on.set()
    await closing
    (kept,) = StateFolder(fleet.room / "state").load().values()
    assert kept.state == "queued"


async def test_asked_again_in_the_middle_of_a_save(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a request with more paths arrives while an answer is saved, the answer is saved again after that request,
    before a client reads it."""
    saves, save = [(threading.Event(), threading.Event()) for _ in range(2)], StateFolder.save
    (begins, may_go_on), (begins_again, may_go_on_again) = saves
    saving = iter(saves)

    def slow(self: StateFolder, identity: str, record: InquiryRecord) -> None:
        if record.state == "done":
            begun, go_on = next(saving)
            begun.set()
            go_on.wait()
        save(self, identity, record)

    monkeypatch.setattr(StateFolder, "save", slow)
    client = fleet.start(state=True)
    inquiry = fleet.inquiry("STOP")
    more = type(inquiry)(key=inquiry.key, paths=(*inquiry.paths, *fleet.inquiry("STOP", 1).paths))
    asking = asyncio.create_task(ask(client, inquiry))
    assert await asyncio.to_thread(begins.wait, 20)
    asking_more = asyncio.create_task(ask(client, more))
    entry = fleet.services[0].find(id_of(inquiry.key))
    assert entry is not None
    await until(client, lambda _: len(entry.record.inquiry.paths) == 2)
    may_go_on.set()
    assert await asyncio.to_thread(begins_again.wait, 20)
    assert entry.record.state == "running"
    may_go_on_again.set()
    assert (await asking).json()["state"] == (await asking_more).json()["state"] == "done"
    await fleet.services[0].close()
    (kept,) = StateFolder(fleet.room / "state").load().values()
    assert kept.state == "done"


async def test_keeps_no_more_than_it_may(fleet: Fleet) -> None:
    """The oldest answers beyond the bound are removed, in memory and on disk."""
    client = fleet.start(state=True, bounds=RetentionLimits(kept=3))
    ids = [(await ask(client, fleet.inquiry("STOP", cycle))).json()["id"] for cycle in range(6)]
    kept = [id for id in ids if (await client.get(f"/v1/inquiries/{id}")).status_code == 200]
    assert kept == ids[-3:] and sorted(path.stem for path in (fleet.room / "state").iterdir()) == sorted(kept)


async def test_state_folder_fails(fleet: Fleet) -> None:
    """If the state folder cannot be written, answers are still given, and the failures are counted."""
    client = fleet.start(state=True)
    (fleet.room / "state").rmdir()
    assert (await ask(client, fleet.inquiry("STOP"))).json()["state"] == "done"
    assert "nvrx_attrsvc_unsaved_total 3.0" in (await client.get("/metrics")).text


async def test_tracked_make_way(fleet: Fleet) -> None:
    """An inquiry that wants an answer takes the place of the oldest tracked one; only the number of open inquiries
    bounds it."""
    client = fleet.start(bounds=RetentionLimits(open=2, kept=3))
    for cycle in range(5):
        assert (await ask(client, fleet.inquiry("STOP", cycle), "track_only", wait_s=0)).status_code == 202
    assert (await client.get("/v1/inquiries")).json()["total"] == 3
    for cycle in (5, 6):
        assert (await ask(client, fleet.inquiry("UNKNOWN", cycle), "progressive")).status_code == 202
    refused = await ask(client, fleet.inquiry("STOP", 7))
    assert refused.status_code == 503 and "2 inquiries are open already" in refused.json()["error"]


async def test_drain(fleet: Fleet) -> None:
    """While it drains, the service refuses new work, finishes what runs, and still answers known inquiries."""
    client = fleet.start()
    inquiry = fleet.inquiry(None)
    asking = asyncio.create_task(ask(client, inquiry))
    await until(client, lambda stats: stats["inquiries"]["running"] == 1)
    draining = asyncio.create_task(fleet.services[0].drain(within_s=20.0))
    await asyncio.sleep(0)
    refused = await ask(client, fleet.inquiry("STOP", 1))
    assert refused.status_code == 503 and "about to end" in refused.json()["error"]
    health = await client.get("/healthz")
    assert (health.status_code, health.json()) == (503, {"status": "draining"})
    await fleet.write(inquiry, "STOP")
    assert await draining and (await asking).json()["state"] == "done"
    assert (await ask(client, inquiry)).status_code == 200


async def test_drain_is_bounded(fleet: Fleet) -> None:
    """Work that does not end within the bound is given up, and every client that waits for it gets its state."""
    client = fleet.start()
    asking = asyncio.create_task(ask(client, fleet.inquiry(None)))
    await until(client, lambda stats: stats["inquiries"]["running"] == 1)
    assert not await fleet.services[0].drain(within_s=0.01)
    await fleet.services[0].close()
    assert (await asking).status_code == 202


async def test_closed_while_it_starts(fleet: Fleet) -> None:
    """A service that is closed while its workers start ends, and leaves no worker."""
    fleet.start(workers=4)
    service = fleet.services[0]
    await asyncio.sleep(0)
    async with asyncio.timeout(20.0):
        await service.close()
    assert all(worker.pid is None for worker in service.stats().workers)
