"""Reports of failures, sent to real HTTP servers that work, misbehave, or do not answer."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nvrx_slurm.attribution.notify import DecidedFailure, DeliveryLimits, Notifier, flush
from nvrx_slurm.attribution.notify.outbox import MOST_MESSAGES
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.model import AttributionSpec, DataflowSpec, SlackSpec
from nvrx_slurm.journal.folder import JobInfo
from nvrx_slurm.journal.verdicts import (
    Attribution,
    Evidence,
    Failed,
    FailureKey,
    Inquiry,
    Scope,
    Verdict,
    VerdictRecord,
)
from nvrx_slurm.lab.plans import plan_json
from tests.harness import WAIT_S
from tests.receivers import Behaviour, IndexServer, SlackServer, answer, cut, hang

TOKEN = "xoxb-correct-horse-battery"
HASTY = DeliveryLimits(
    connect_s=2.0, answer_s=1.0, attempts=3, first_pause_s=0.01, jitter_s=0.01, longest_pause_s=2.0, total_s=10.0
)
Receiving = SlackServer | IndexServer

SPOOLER = """
import asyncio, sys
from pathlib import Path
from msgspec.json import decode
from nvrx_slurm.attribution.notify import Notifier, DecidedFailure
from nvrx_slurm.jobspec.model import AttributionSpec

async def tell():
    notifier = Notifier(decode(sys.argv[1], type=AttributionSpec), Path(sys.argv[2]))
    await notifier.decided(decode(sys.argv[3], type=DecidedFailure))
    print("spooled", flush=True)
    await asyncio.Event().wait()

asyncio.run(tell())
"""


def decided(folder: Path, cycle: int = 0, **changes: Any) -> DecidedFailure:
    """A failure that has been analysed."""
    key = FailureKey(job=str(folder), generation=0, replica="main-0", cycle=cycle, rank=3)
    failed = Failed(cause="rank 3 on n2 failed: exit code 1", node="n2", rank=3, exit_code=1, t=1_700_000_000.0)
    line = Evidence(file="logs/rank-3.err", line=17, text="torch.OutOfMemoryError: CUDA out of memory", rank=3)
    said = Attribution(
        source="lib",
        verdict=Verdict.STOP,
        confidence=0.97,
        fault="cuda_oom",
        scope=Scope.USER_CODE,
        ranks=(3,),
        primary=line,
        explanation="The model does not fit.",
        latency_s=0.4,
    )
    judged = VerdictRecord(key=key, verdict=Verdict.STOP, acted=True, action="stop", nodes_blamed=("n2",))
    whole = {"inquiry": Inquiry(key=key, paths=(), failed=failed), "attributions": (said,), "judged": judged}
    return DecidedFailure(key=key, **(whole | changes))


class Case:
    """One kind of receiver, a real server of its kind, and a job's folder."""

    def __init__(self, server: Receiving, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.token_file = folder.parent / "token"
        self.token_file.write_text(TOKEN + "\n")
        self.token_file.chmod(0o600)

    @property
    def plan(self) -> AttributionSpec:
        token_file, url = str(self.token_file), self.server.url
        if isinstance(self.server, SlackServer):
            return AttributionSpec(
                slack=SlackSpec(channel="#runs", token_file=token_file, mention="U1", url=url), enable_lib=False
            )
        return AttributionSpec(
            dataflow=DataflowSpec(url=url, index="failures", token_file=token_file), enable_lib=False
        )

    def notifier(self, limits: DeliveryLimits = HASTY) -> Notifier:
        return Notifier(self.plan, self.folder, limits=limits)

    def cycles(self) -> list[int]:
        """The cycles that were reported to the receiver, in the order of arrival."""
        if isinstance(self.server, SlackServer):
            texts = [json.dumps(message["blocks"]) for message in self.server.messages]
            return [int(text.partition(", cycle ")[2].partition(",")[0]) for text in texts]
        return [document["cycle"] for document in self.server.documents.values()]

    def waiting(self) -> list[Path]:
        return sorted((self.folder / "spool").glob("*/*-*.json"))


@pytest.fixture(params=[SlackServer, IndexServer], ids=["slack", "dataflow"])
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Case]:
    """Each kind of receiver, with its server listening."""
    folder = tmp_path / "jobs" / "1234"
    folder.mkdir(parents=True)
    server = request.param()
    await server.start()
    yield Case(server, folder)
    await server.stop()


async def test_a_healthy_receiver_gets_one_report_and_the_spool_is_empty(case: Case) -> None:
    """The report is one request, with the receiver's token."""
    notifier = case.notifier()
    await notifier.decided(decided(case.folder))
    await notifier.close()
    assert case.cycles() == [0]
    assert case.waiting() == []
    (request,) = case.server.requests
    assert request.headers["authorization"] == f"Bearer {TOKEN}"


async def test_many_failures_are_reported_in_order(case: Case) -> None:
    """A failure that is decided during a delivery is delivered next, without a further call."""
    notifier = case.notifier()
    for cycle in range(20):
        await notifier.decided(decided(case.folder, cycle))
    await case.server.until(lambda: len(case.cycles()) == 20)
    await notifier.close()
    assert case.cycles() == list(range(20))


@pytest.mark.parametrize(
    "bad",
    [
        answer(500),
        answer(503, Retry_After="0"),
        answer(429, Retry_After="0"),
        answer(408),
        hang,
        cut,
        answer(502, b"<html>Bad Gateway</html>"),
    ],
    ids=["500", "503", "429", "408", "hangs", "closes mid-body", "a proxy's page"],
)
async def test_a_delivery_is_retried_after_a_temporary_error(case: Case, bad: Behaviour) -> None:
    """After two temporary errors the failure is reported, once."""
    case.server.behaviours = [bad, bad]
    notifier = case.notifier()
    await notifier.decided(decided(case.folder))
    await case.server.until(lambda: case.cycles() != [])
    await notifier.close()
    assert (case.cycles(), len(case.server.requests), case.waiting()) == ([0], 3, [])


async def test_a_receiver_is_left_alone_for_as_long_as_it_asks(case: Case) -> None:
    """The next attempt waits for as long as `Retry-After` says."""
    case.server.behaviours = [answer(429, Retry_After="1")]
    notifier, loop = case.notifier(), asyncio.get_running_loop()
    await notifier.decided(decided(case.folder))
    await case.server.has_had(1)
    begun = loop.time()
    await case.server.has_had(2)
    assert loop.time() - begun > 0.9
    await notifier.close()
    assert case.cycles() == [0]


@pytest.mark.parametrize("how", ["seconds", "date"])
async def test_a_long_retry_after_is_not_waited_for(case: Case, how: str) -> None:
    """The reports stay in the spool, and a further failure sends no request."""
    later = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True) if how == "date" else "3600"
    case.server.behaviours = [answer(429, Retry_After=later)]
    notifier = case.notifier()
    await notifier.decided(decided(case.folder, 0))
    await case.server.has_had(1)
    await notifier.decided(decided(case.folder, 1))
    await notifier.close()
    assert len(case.server.requests) == 1
    assert len(case.waiting()) == 2
    # A flush does not know of the pause, as a new process would not.
    (flushed,) = await flush(case.plan, case.folder, limits=HASTY)
    assert (flushed.sent, flushed.left, flushed.problem) == (2, 0, None)


async def test_reports_that_a_receiver_missed_are_sent_when_it_is_back(case: Case) -> None:
    """The next failure sends the spooled reports first, in order. A decision never waits for a delivery."""
    await case.server.stop()
    notifier = case.notifier()
    for cycle in range(3):
        await notifier.decided(decided(case.folder, cycle))
    await notifier.close()
    assert len(case.waiting()) == 3
    await case.server.start()
    again = case.notifier()
    await again.decided(decided(case.folder, 3))
    await again.close()
    assert (case.cycles(), case.waiting()) == ([0, 1, 2, 3], [])


async def test_close_is_bounded_while_the_receiver_hangs(case: Case) -> None:
    """A report that was not delivered stays in the spool, and a flush delivers it."""
    case.server.behaviours = [hang] * 5
    patient = DeliveryLimits(answer_s=600.0)
    notifier = case.notifier(patient)
    await notifier.decided(decided(case.folder))
    await case.server.has_had(1)
    async with asyncio.timeout(WAIT_S):
        await notifier.close(0.05)
    assert len(case.waiting()) == 1
    case.server.behaviours = []
    (flushed,) = await flush(case.plan, case.folder, limits=HASTY)
    assert (flushed.sent, flushed.left, flushed.problem) == (1, 0, None)
    assert case.cycles() == [0]


async def test_a_wrong_token_is_logged_once_and_loses_no_report(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    """Only one request is sent. The log says what to check, and all reports can be delivered later."""
    no = answer(200, {"ok": False, "error": "invalid_auth"}) if isinstance(case.server, SlackServer) else answer(401)
    case.server.behaviours = [no]
    notifier = case.notifier()
    for cycle in range(3):
        await notifier.decided(decided(case.folder, cycle))
        await case.server.has_had(1)
    await notifier.close()
    assert len(case.server.requests) == 1
    assert len(case.waiting()) == 3
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("nvrx")]
    assert len(warnings) == 1
    assert "token_file" in warnings[0]
    (flushed,) = await flush(case.plan, case.folder, limits=HASTY)
    assert flushed.sent == 3
    assert case.cycles() == [0, 1, 2]


async def test_a_receiver_that_was_repaired_gets_the_next_failure(case: Case) -> None:
    """A refusal is not final for the notifier: a job may run for weeks after a person has repaired the receiver."""
    no = (
        answer(200, {"ok": False, "error": "not_in_channel"}) if isinstance(case.server, SlackServer) else answer(404)
    )
    case.server.behaviours = [no]
    notifier = case.notifier(dataclasses.replace(HASTY, refused_s=0.0))
    await notifier.decided(decided(case.folder, 0))
    async with asyncio.timeout(WAIT_S):
        # A failure that is decided before this delivery has ended would be refused with it.
        await asyncio.wait(notifier._deliveries.values())
    await notifier.decided(decided(case.folder, 1))
    await notifier.close()
    assert (case.cycles(), case.waiting()) == ([0, 1], [])


async def test_a_token_that_others_can_read_is_not_used(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    """No request is sent; the problem names the file, its mode, and the fix."""
    case.token_file.chmod(0o644)
    (flushed,) = await _told_then_flushed(case)
    assert case.server.requests == []
    assert flushed.left == 1
    assert flushed.problem is not None
    assert str(case.token_file) in flushed.problem
    assert "mode 0644" in flushed.problem
    assert "chmod 600" in flushed.problem
    assert TOKEN not in caplog.text


async def test_the_environment_gives_the_token_where_no_file_does(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each receiver has an environment variable of its own."""
    variable = "NVRX_SLURM_SLACK_TOKEN" if isinstance(case.server, SlackServer) else "NVRX_SLURM_DATAFLOW_TOKEN"
    monkeypatch.setenv(variable, "ApiKey-less")
    plan = case.plan
    if plan.slack:
        plan = AttributionSpec(slack=SlackSpec(channel="#runs", url=case.server.url), enable_lib=False)
    else:
        plan = AttributionSpec(dataflow=DataflowSpec(url=case.server.url, index="failures"), enable_lib=False)
    notifier = Notifier(plan, case.folder, limits=HASTY)
    await notifier.decided(decided(case.folder))
    await notifier.close()
    assert [request.headers["authorization"] for request in case.server.requests] == ["Bearer ApiKey-less"]


async def test_no_token_is_in_anything_that_is_kept(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    """No file of the job folder, and no log record, contains the token."""
    caplog.set_level("DEBUG")
    await case.server.stop()
    await _told_then_flushed(case)
    kept = [path.read_text() for path in case.folder.rglob("*") if path.is_file()]
    assert len(kept) >= 1
    assert not any(TOKEN in text for text in kept)
    assert TOKEN not in caplog.text


async def test_a_redirect_is_not_followed(case: Case) -> None:
    """No other host gets a request, and so none gets the token."""
    elsewhere = IndexServer()
    await elsewhere.start()
    case.server.behaviours = [answer(307, Location=elsewhere.url)]
    (flushed,) = await _told_then_flushed(case)
    await elsewhere.stop()
    assert elsewhere.requests == []
    assert flushed.sent == 1  # the flush met no redirect


async def test_a_full_spool_drops_the_oldest(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    """An outage uses a bounded amount of disk, and the log says what was dropped."""
    await case.server.stop()
    notifier = case.notifier(DeliveryLimits(attempts=1))
    for cycle in range(MOST_MESSAGES + 3):
        await notifier.decided(decided(case.folder, cycle))
    await notifier.close()
    assert len(case.waiting()) == MOST_MESSAGES
    assert "the oldest 1 messages are dropped" in caplog.text
    await case.server.start()
    (flushed,) = await flush(case.plan, case.folder, limits=HASTY)
    assert flushed.sent == MOST_MESSAGES
    assert case.cycles() == list(range(3, MOST_MESSAGES + 3))


async def test_a_report_is_sent_even_if_it_cannot_be_spooled(case: Case) -> None:
    """Where the spool cannot be written, the report is delivered from memory."""
    (case.folder / "spool").write_text("in the way")
    notifier = case.notifier()
    await notifier.decided(decided(case.folder))
    await notifier.close()
    assert case.cycles() == [0]


async def test_a_torn_message_is_dropped_and_the_next_is_sent(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    """The log names the failure whose report is lost."""
    await case.server.stop()
    notifier = case.notifier()
    for cycle in range(2):
        await notifier.decided(decided(case.folder, cycle))
    await notifier.close()
    torn, _ = case.waiting()
    torn.write_bytes(torn.read_bytes()[:40])
    await case.server.start()
    (flushed,) = await flush(case.plan, case.folder, limits=HASTY)
    assert (flushed.sent, flushed.left) == (1, 0)
    assert case.cycles() == [1]
    assert torn.stem.partition("-")[2] in caplog.text


async def test_concurrent_flushes_report_each_failure_once(case: Case) -> None:
    """The broker's delivery and a manual flush may run at the same time."""
    await case.server.stop()
    notifier = case.notifier()
    for cycle in range(5):
        await notifier.decided(decided(case.folder, cycle))
    await notifier.close()
    await case.server.start()
    flushes = await asyncio.gather(*(flush(case.plan, case.folder, limits=HASTY) for _ in range(3)))
    assert sum(flushed.sent for (flushed,) in flushes) == 5
    assert case.cycles() == list(range(5))
    assert sum(len(request.body) > 0 for request in case.server.requests) in (1, 5)  # in bulk, or one by one


async def test_the_same_failure_from_two_controllers_is_reported_once(case: Case) -> None:
    """A new controller decides again what the old one had decided."""
    for _ in range(2):
        notifier = case.notifier()
        await notifier.decided(decided(case.folder))
        await notifier.close()
    assert case.cycles() == [0]
    assert case.waiting() == []


@pytest.mark.parametrize("is_down", [False, True], ids=["up", "down"])
async def test_the_brokers_process_sends_or_spools_before_it_ends(case: Case, is_down: bool) -> None:
    """When its controller closes its input, the broker ends, and no report is lost."""
    if is_down:
        await case.server.stop()
    info = JobInfo(job_id="1234", name="llama", cluster="slurm", started_at=0.0)
    (case.folder / "job.json").write_bytes(msgspec.json.encode(info))
    ledger = case.folder.parent / "suspects.json"
    plan = msgspec.structs.replace(case.plan, ledger=str(ledger))
    (case.folder / "plan.json").write_bytes(plan_json(attribution=plan))
    lost = decided(case.folder)
    failed = Failed(cause="n2 lost: connection to its agent closed", node="n2")
    inquiry = Inquiry(key=msgspec.structs.replace(lost.key, rank=None), paths=(), failed=failed)
    judged = msgspec.structs.replace(lost.judged, key=inquiry.key)
    lines = [{"ask": inquiry, "settled": True}, {"judged": judged}]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "nvrx_slurm.attribution"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=env.child_environment({"NVRX_JOB_FOLDER": str(case.folder), "SLURM_CLUSTER_NAME": "alpha"}),
    )
    assert process.stdin is not None
    process.stdin.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    async with asyncio.timeout(WAIT_S):
        # Wait before the input is closed: after that, the broker has three seconds to send, and spools the rest.
        if not is_down:
            await case.server.until(lambda: case.cycles() == [0])
        process.stdin.close()
        await process.communicate()
    assert process.returncode == 0
    assert (case.cycles(), len(case.waiting())) == (([], 1) if is_down else ([0], 0))
    assert b'"cluster":"alpha","node":"n2","kind":"lost"' in ledger.read_bytes()


async def test_reports_of_a_killed_process_are_sent_by_a_later_one(case: Case) -> None:
    """A report is on disk before it is sent."""
    case.server.behaviours = [hang]
    reported = [msgspec.json.encode(part).decode() for part in (case.plan, decided(case.folder))]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SPOOLER, reported[0], str(case.folder), reported[1]), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_S):
        assert await process.stdout.readline() == b"spooled\n"
        await case.server.has_had(1)
    process.kill()
    await process.wait()
    assert len(case.waiting()) == 1
    (flushed,) = await flush(case.plan, case.folder, limits=HASTY)
    assert (flushed.sent, case.cycles(), case.waiting()) == (1, [0], [])


@pytest.mark.parametrize("broken", ["job.json", "slack.json", "."])
async def test_a_folder_that_is_broken_raises_nothing(case: Case, broken: str) -> None:
    """The broker reports the failure although the job folder, or a file in it, is broken."""
    if broken == ".":
        case.folder.rmdir()
        case.folder.write_text("in the way")
    else:
        (case.folder / broken).write_bytes(b"\xff{")
    notifier = case.notifier()
    await notifier.decided(decided(case.folder))
    await notifier.close()
    assert case.cycles() == [0]


async def _told_then_flushed(case: Case) -> Any:
    notifier = case.notifier()
    await notifier.decided(decided(case.folder))
    await notifier.close()
    return await flush(case.plan, case.folder, limits=HASTY)


# ---- what only Slack does


@pytest.fixture
async def slack(tmp_path: Path) -> AsyncIterator[Case]:
    folder = tmp_path / "jobs" / "1234"
    folder.mkdir(parents=True)
    server = SlackServer()
    await server.start()
    yield Case(server, folder)
    await server.stop()


async def test_a_job_has_one_thread(slack: Case) -> None:
    """The job's first message starts the thread. Later processes post to the same channel and thread."""
    for cycle in range(3):
        notifier = slack.notifier()
        await notifier.decided(decided(slack.folder, cycle))
        await notifier.close()
    first, *others = slack.server.messages  # type: ignore[union-attr]
    assert (first["channel"], "thread_ts" in first) == ("#runs", False)
    assert [(other["channel"], other["thread_ts"]) for other in others] == [("C42", "1700000000.000001")] * 2


async def test_a_thread_that_takes_no_more_is_followed_by_a_new_one(slack: Case) -> None:
    """A person has deleted or locked the thread: the message starts a new one."""
    notifier = slack.notifier()
    await notifier.decided(decided(slack.folder, 0))
    await slack.server.until(lambda: slack.cycles() == [0])
    slack.server.behaviours = [answer(200, {"ok": False, "error": "thread_not_found"})]
    await notifier.decided(decided(slack.folder, 1))
    await slack.server.until(lambda: slack.cycles() == [0, 1])
    await notifier.close()
    assert ["thread_ts" in request.json for request in slack.server.requests] == [False, True, False]


@pytest.mark.parametrize("error", ["channel_not_found", "not_in_channel", "no_such_error_yet"])
async def test_what_slack_will_refuse_again_is_not_tried_again(
    slack: Case, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is logged once, with Slack's own code, and the messages stay in the spool."""
    slack.server.behaviours = [answer(200, {"ok": False, "error": error})]
    notifier = slack.notifier()
    for cycle in range(2):
        await notifier.decided(decided(slack.folder, cycle))
        await slack.server.has_had(1)
    await notifier.close()
    assert (len(slack.server.requests), len(slack.waiting())) == (1, 2)
    assert caplog.text.count(error) == 1


async def test_a_message_that_slack_cannot_take_does_not_hold_up_the_next(slack: Case) -> None:
    """A message that Slack calls invalid is dropped, and the next one is sent."""
    slack.server.behaviours = [answer(200, {"ok": False, "error": "invalid_blocks"})]
    notifier = slack.notifier()
    await notifier.decided(decided(slack.folder, 0))
    await slack.server.has_had(1)
    await notifier.decided(decided(slack.folder, 1))
    await notifier.close()
    assert (slack.cycles(), slack.waiting()) == ([1], [])


# ---- what only an index does


@pytest.fixture
async def index(tmp_path: Path) -> AsyncIterator[Case]:
    folder = tmp_path / "jobs" / "1234"
    folder.mkdir(parents=True)
    server = IndexServer()
    await server.start()
    yield Case(server, folder)
    await server.stop()


async def test_a_document_whose_answer_was_lost_is_stored_once(index: Case) -> None:
    """The document's id is the failure's own: the second attempt gets 409, which counts as delivered."""
    server = index.server
    assert isinstance(server, IndexServer)
    first = decided(index.folder)

    async def take_and_cut(writer: asyncio.StreamWriter) -> None:
        server.documents[first.identity] = server.requests[-1].json
        await cut(writer)

    server.behaviours = [take_and_cut]
    notifier = index.notifier()
    await notifier.decided(first)
    await server.has_had(2)
    await notifier.close()
    assert (index.cycles(), index.waiting()) == ([0], [])
    assert server.requests[0].path == f"/failures/_doc/{first.identity}?op_type=create"


async def test_what_has_piled_up_is_sent_in_bulk(index: Case) -> None:
    """Spooled documents are sent in one request. A document that the index refuses is dropped; one that the index is
    too busy for is sent again."""
    await index.server.stop()
    notifier = index.notifier()
    reported = [decided(index.folder, cycle) for cycle in range(3)]
    for each in reported:
        await notifier.decided(each)
    await notifier.close()
    await index.server.start()
    items = [
        {"create": {"_id": each.identity, "status": status, "error": {"type": "x"}}}
        for each, status in zip(reported, (201, 400, 429), strict=True)
    ]
    index.server.requests.clear()
    index.server.behaviours = [answer(200, {"errors": True, "items": items})]
    (flushed,) = await flush(index.plan, index.folder, limits=HASTY)
    assert (flushed.sent, flushed.left, flushed.problem) == (2, 0, None)
    assert [request.path for request in index.server.requests] == [
        "/failures/_bulk",
        f"/failures/_doc/{reported[2].identity}?op_type=create",
    ]
    assert index.cycles() == [2]


async def test_more_than_the_index_takes_at_once_is_sent_in_parts(index: Case) -> None:
    """A proxy may limit the size of a request. Only a document that is too large on its own is dropped."""
    await index.server.stop()
    notifier = index.notifier()
    for cycle in range(4):
        await notifier.decided(decided(index.folder, cycle))
    await notifier.close()
    await index.server.start()
    index.server.requests.clear()
    # For all four documents; for the first two; for the first one alone.
    index.server.behaviours = [answer(413) for _ in range(3)]
    (flushed,) = await flush(index.plan, index.folder, limits=HASTY)
    assert (flushed.sent, flushed.left, flushed.problem) == (3, 0, None)
    assert index.cycles() == [1, 2, 3]


async def test_an_index_that_answers_about_other_documents_is_asked_once(index: Case) -> None:
    """As an index does whose pipeline sets `_id`. The documents stay in the spool."""
    await index.server.stop()
    notifier = index.notifier()
    for cycle in range(2):
        await notifier.decided(decided(index.folder, cycle))
    await notifier.close()
    await index.server.start()
    items = [{"create": {"_id": f"other-{cycle}", "status": 201}} for cycle in range(2)]
    index.server.requests.clear()
    index.server.behaviours = [answer(200, {"errors": False, "items": items}) for _ in range(20)]
    (flushed,) = await flush(index.plan, index.folder, limits=HASTY)
    assert (flushed.sent, flushed.left) == (0, 2)
    assert flushed.problem == "its answer names none of the messages that were sent"
    assert len(index.server.requests) == 1


async def test_a_token_with_its_own_scheme_is_sent_unchanged(index: Case) -> None:
    """Elasticsearch's API keys are not bearer tokens."""
    index.token_file.write_text("ApiKey c2VjcmV0")
    notifier = index.notifier()
    await notifier.decided(decided(index.folder))
    await notifier.close()
    assert index.server.requests[0].headers["authorization"] == "ApiKey c2VjcmV0"


async def test_blames_that_a_job_has_left_are_delivered_from_any_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm names the cluster only inside a job, so a spooled blame contains the cluster's name."""
    folder, ledger = tmp_path / "1234", tmp_path / "suspects.json"
    folder.mkdir()
    info = JobInfo(job_id="1234", name="llama", cluster="slurm", started_at=0.0)
    (folder / "job.json").write_bytes(msgspec.json.encode(info))
    ledger.mkdir()  # a folder in place of the ledger cannot be used
    plan = AttributionSpec(ledger=str(ledger))
    key = FailureKey(job=str(folder), generation=0, replica="main-0", cycle=0)
    lost = Inquiry(key=key, paths=(), failed=Failed(cause="n2 was lost", node="n2"))
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "alpha")
    notifier = Notifier(plan, folder, limits=HASTY)
    await notifier.decided(DecidedFailure(key=key, inquiry=lost))
    await notifier.close()
    monkeypatch.delenv("SLURM_CLUSTER_NAME")
    (flushed,) = await flush(plan, folder, limits=HASTY)
    assert (flushed.receiver, flushed.sent, flushed.left) == ("ledger", 0, 1)
    ledger.rmdir()
    (flushed,) = await flush(plan, folder, limits=HASTY)
    assert (flushed.sent, flushed.left, flushed.problem) == (1, 0, None)
    assert b'"cluster":"alpha","node":"n2","kind":"lost"' in ledger.read_bytes()
