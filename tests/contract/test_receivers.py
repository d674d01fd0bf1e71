"""Reports of failures, on real HTTP servers that behave well, badly, and not at all."""

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
    """A failure that has been looked into."""
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
    """Each kind of receiver; its server listens."""
    folder = tmp_path / "jobs" / "1234"
    folder.mkdir(parents=True)
    server = request.param()
    await server.start()
    yield Case(server, folder)
    await server.stop()


async def test_a_receiver_that_is_well_is_told_once_and_nothing_is_left(case: Case) -> None:
    """With its token, and over one connection."""
    notifier = case.notifier()
    await notifier.decided(decided(case.folder))
    await notifier.close()
    assert case.cycles() == [0]
    assert case.waiting() == []
    (request,) = case.server.requests
    assert request.headers["authorization"] == f"Bearer {TOKEN}"


async def test_many_failures_are_told_in_their_order(case: Case) -> None:
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
async def test_a_receiver_that_is_ill_for_a_moment_is_tried_again(case: Case, bad: Behaviour) -> None:
    """And is reported once."""
    case.server.behaviours = [bad, bad]
    notifier = case.notifier()
    await notifier.decided(decided(case.folder))
    await case.server.until(lambda: case.cycles() != [])
    await notifier.close()
    assert (case.cycles(), len(case.server.requests), case.waiting()) == ([0], 3, [])


async def test_a_receiver_is_left_alone_for_as_long_as_it_asks(case: Case) -> None:
    """`Retry-After` in seconds: the next try comes no sooner."""
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
async def test_nobody_waits_for_one_who_wants_to_be_left_alone_for_long(case: Case, how: str) -> None:
    """The reports stay in the spool, and further failures do not bother the receiver."""
    later = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True) if how == "date" else "3600"
    case.server.behaviours = [answer(429, Retry_After=later)]
    notifier = case.notifier()
    await notifier.decided(decided(case.folder, 0))
    await case.server.has_had(1)
    await notifier.decided(decided(case.folder, 1))
    await notifier.close()
    assert len(case.server.requests) == 1
    assert len(case.waiting()) == 2
    (flushed,) = await flush(case.plan, case.folder, limits=HASTY)  # a new process does not know of the pause
    assert (flushed.sent, flushed.left, flushed.problem) == (2, 0, None)


async def test_what_a_receiver_that_is_down_misses_is_told_when_it_is_back(case: Case) -> None:
    """In order, with the next failure; the decision never waits for it."""
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


async def test_close_is_over_in_time_whatever_the_receiver_does(case: Case) -> None:
    """What it did not take waits in the spool, and a flush delivers it."""
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


async def test_a_wrong_token_is_told_once_and_costs_nothing_but_time(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    """One request in all; the log says what to check, and holds no token; all reports can be delivered later."""
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


async def test_a_receiver_that_was_mended_is_told_of_the_next_failure(case: Case) -> None:
    """A job may run for weeks after a person has repaired the receiver."""
    no = (
        answer(200, {"ok": False, "error": "not_in_channel"}) if isinstance(case.server, SlackServer) else answer(404)
    )
    case.server.behaviours = [no]
    notifier = case.notifier(dataclasses.replace(HASTY, refused_s=0.0))
    await notifier.decided(decided(case.folder, 0))
    async with asyncio.timeout(WAIT_S):
        await asyncio.wait(notifier._deliveries.values())  # one that came before its end would be refused with it
    await notifier.decided(decided(case.folder, 1))
    await notifier.close()
    assert (case.cycles(), case.waiting()) == ([0, 1], [])


async def test_a_token_that_others_can_read_is_not_used(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    """No request; the log names the file, its mode, and what to do."""
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
    """Each receiver has a variable of its own."""
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
    """Neither in the spool, nor beside it, nor in what is logged."""
    caplog.set_level("DEBUG")
    await case.server.stop()
    await _told_then_flushed(case)
    kept = [path.read_text() for path in case.folder.rglob("*") if path.is_file()]
    assert len(kept) >= 1
    assert not any(TOKEN in text for text in kept)
    assert TOKEN not in caplog.text


async def test_a_redirect_is_not_followed(case: Case) -> None:
    """No other host gets the token."""
    elsewhere = IndexServer()
    await elsewhere.start()
    case.server.behaviours = [answer(307, Location=elsewhere.url)]
    (flushed,) = await _told_then_flushed(case)
    await elsewhere.stop()
    assert elsewhere.requests == []
    assert flushed.sent == 1  # the second process found no redirect


async def test_a_spool_that_is_full_lets_the_oldest_go(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    """An outage costs so much disk and no more, and it is said."""
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


async def test_a_disk_that_takes_nothing_does_not_keep_a_receiver_from_being_told(case: Case) -> None:
    """The spool is a net, not a gate."""
    (case.folder / "spool").write_text("in the way")
    notifier = case.notifier()
    await notifier.decided(decided(case.folder))
    await notifier.close()
    assert case.cycles() == [0]


async def test_a_torn_parcel_is_dropped_and_the_next_is_told(case: Case, caplog: pytest.LogCaptureFixture) -> None:
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


async def test_two_who_empty_one_spool_tell_each_failure_once(case: Case) -> None:
    """The desk and a flush by hand may meet."""
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


async def test_the_same_failure_told_by_two_controllers_is_told_once(case: Case) -> None:
    """A new controller judges again what the old one had judged."""
    for _ in range(2):
        notifier = case.notifier()
        await notifier.decided(decided(case.folder))
        await notifier.close()
    assert case.cycles() == [0]
    assert case.waiting() == []


@pytest.mark.parametrize("is_down", [False, True], ids=["there", "down"])
async def test_the_desks_own_process_tells_or_spools_before_it_ends(case: Case, is_down: bool) -> None:
    """Its controller goes away; within some seconds the broker is gone too, and no report is lost."""
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
        if not is_down:  # before the end: a slow machine spools what it cannot send within the last three seconds
            await case.server.until(lambda: case.cycles() == [0])
        process.stdin.close()
        await process.communicate()
    assert process.returncode == 0
    assert (case.cycles(), len(case.waiting())) == (([], 1) if is_down else ([0], 0))
    assert b'"cluster":"alpha","node":"n2","kind":"lost"' in ledger.read_bytes()


async def test_what_a_killed_process_had_not_told_yet_is_told_by_a_later_one(case: Case) -> None:
    """The reports are on disk before any is sent."""
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
    """The desk has better things to do than to look after this."""
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
    """Its first message begins it, also for later processes; they post where the first one landed."""
    for cycle in range(3):
        notifier = slack.notifier()
        await notifier.decided(decided(slack.folder, cycle))
        await notifier.close()
    first, *others = slack.server.messages  # type: ignore[union-attr]
    assert (first["channel"], "thread_ts" in first) == ("#runs", False)
    assert [(other["channel"], other["thread_ts"]) for other in others] == [("C42", "1700000000.000001")] * 2


async def test_a_thread_that_takes_no_more_is_followed_by_a_new_one(slack: Case) -> None:
    """A person has deleted or locked it."""
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
    """It is logged once, with Slack's own word; the message waits for a repair."""
    slack.server.behaviours = [answer(200, {"ok": False, "error": error})]
    notifier = slack.notifier()
    for cycle in range(2):
        await notifier.decided(decided(slack.folder, cycle))
        await slack.server.has_had(1)
    await notifier.close()
    assert (len(slack.server.requests), len(slack.waiting())) == (1, 2)
    assert caplog.text.count(error) == 1


async def test_a_message_that_slack_cannot_take_does_not_hold_up_the_next(slack: Case) -> None:
    """It is dropped, and said."""
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


async def test_a_document_whose_answer_was_lost_is_there_once(index: Case) -> None:
    """It is created under its failure's own id: the second try gets 409, which counts as delivered."""
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
    """One request; a document that is refused is dropped, one that the index is too busy for is sent again."""
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
    """A proxy before it has a bound for a request: a document that is too large alone is dropped, and no other."""
    await index.server.stop()
    notifier = index.notifier()
    for cycle in range(4):
        await notifier.decided(decided(index.folder, cycle))
    await notifier.close()
    await index.server.start()
    index.server.requests.clear()
    # Of all four; of the first two; of the first alone.
    index.server.behaviours = [answer(413) for _ in range(3)]
    (flushed,) = await flush(index.plan, index.folder, limits=HASTY)
    assert (flushed.sent, flushed.left, flushed.problem) == (3, 0, None)
    assert index.cycles() == [1, 2, 3]


async def test_an_index_that_answers_about_other_documents_is_asked_once(index: Case) -> None:
    """As where one of its pipelines sets `_id`. What it was sent stays in the spool."""
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


async def test_a_token_that_says_what_it_is_is_sent_as_it_is(index: Case) -> None:
    """Elasticsearch's own keys are no bearer tokens."""
    index.token_file.write_text("ApiKey c2VjcmV0")
    notifier = index.notifier()
    await notifier.decided(decided(index.folder))
    await notifier.close()
    assert index.server.requests[0].headers["authorization"] == "ApiKey c2VjcmV0"


async def test_blames_that_a_job_has_left_are_delivered_from_any_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm names the cluster in a job alone; the blames that were spooled there name it themselves."""
    folder, ledger = tmp_path / "1234", tmp_path / "suspects.json"
    folder.mkdir()
    info = JobInfo(job_id="1234", name="llama", cluster="slurm", started_at=0.0)
    (folder / "job.json").write_bytes(msgspec.json.encode(info))
    ledger.mkdir()  # it cannot be used
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
