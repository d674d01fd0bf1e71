"""Slack: a message for each decided failure, all of one job in one thread."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from nvrx_slurm.attribution.notify.decided import Decided
from nvrx_slurm.attribution.notify.http import Answer, Http
from nvrx_slurm.attribution.notify.receiver import Later, Patience, Refused, bounded
from nvrx_slurm.attribution.notify.secrets import token_of
from nvrx_slurm.attribution.notify.spool import Parcel
from nvrx_slurm.attribution.notify.telling import slack_message
from nvrx_slurm.errors import MalformedRecord
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.model import SlackSpec
from nvrx_slurm.journal.verdicts import Wire
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.decoding import decode_json
from nvrx_slurm.util.files import write_private
from nvrx_slurm.util.log import get_logger

log = get_logger("postprocessing")

MOST_TOLD = 256

# What `chat.postMessage` says when it says no (its reference page, "Errors"): whom that is about.
_AWAY = {"ratelimited", "rate_limited", "internal_error", "fatal_error", "service_unavailable", "request_timeout"}
_OF_THE_MESSAGE = {"invalid_blocks", "invalid_blocks_format", "msg_too_long", "msg_blocks_too_long", "no_text"}
_OF_THE_THREAD = {
    "cannot_reply_to_message",
    "thread_not_found",
    "invalid_thread_ts",
    "restricted_action_thread_locked",
}
_WHAT_TO_DO = {
    "channel_not_found": "check slack.channel, and invite the app into it",
    "not_in_channel": "invite the app into the channel",
    "is_archived": "choose a channel that is not archived",
    "missing_scope": "give the app the scope chat:write",
    **dict.fromkeys(
        ("invalid_auth", "not_authed", "token_revoked", "token_expired", "account_inactive"),
        "check slack.token_file or NVRX_SLURM_SLACK_TOKEN",
    ),
}


class Thread(Wire, frozen=True, kw_only=True):
    """The job's thread, kept in its folder: where it is, and which failures it has been told of, newest last."""

    channel: str  # as the plan names it
    channel_id: str = ""
    ts: str | None = None
    told: tuple[str, ...] = ()


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What Slack answers."""

    ok: bool
    error: str = ""
    channel: str = ""
    ts: str = ""


class Slack:
    """Messages in the order of failures. One whose answer was lost may come twice: Slack knows no such thing as a
    message's own id."""

    name, batch = "slack", 1

    def __init__(self, plan: SlackSpec, folder: Path, *, name: str, patience: Patience, clock: Clock) -> None:
        self._plan, self._job_name = plan, name
        self._path = folder / "slack.json"
        self._http = Http("Slack", patience=patience, clock=clock)
        self._thread: Thread | None = None

    def body(self, decided: Decided) -> bytes:
        plan = self._plan
        message = slack_message(decided, channel=plan.channel, mention=plan.mention, name=self._job_name)
        return msgspec.json.encode(message)

    async def deliver(self, parcels: Sequence[Parcel]) -> Mapping[str, str | None]:
        (parcel,) = parcels
        self._thread = self._thread or await self._kept()
        if parcel.identity in self._thread.told:
            return {parcel.identity: None}
        try:
            message = decode_json(dict[str, Any], parcel.body, "the message")
        except MalformedRecord:
            return {parcel.identity: "what waits in the spool is no message"}
        return {parcel.identity: await self._post(message, parcel.identity, self._thread)}

    async def close(self) -> None:
        await self._http.close()

    async def _post(self, message: dict[str, Any], identity: str, thread: Thread) -> str | None:
        if thread.ts is not None:
            message = {**message, "channel": thread.channel_id or message["channel"], "thread_ts": thread.ts}
        reply = _reply(await self._send(msgspec.json.encode(message)))
        if reply.ok:
            first = thread if thread.ts else msgspec.structs.replace(thread, channel_id=reply.channel, ts=reply.ts)
            await self._keep(msgspec.structs.replace(first, told=(*thread.told, identity)[-MOST_TOLD:]))
            return None
        if reply.error in _OF_THE_MESSAGE:
            return f"Slack says {reply.error}"
        if thread.ts is not None and reply.error in _OF_THE_THREAD:
            await self._keep(msgspec.structs.replace(thread, channel_id="", ts=None))
            raise Later(f"Slack takes nothing in the thread of before ({reply.error}): a new one is begun")
        if reply.error in _AWAY:
            raise Later(f"Slack says {reply.error}")
        todo = _WHAT_TO_DO.get(reply.error, "see Slack's reference of chat.postMessage")
        raise Refused(f"Slack refuses ({reply.error}): {todo}")

    async def _send(self, content: bytes) -> Answer:
        key = "fault_tolerance.attribution.slack.token_file"
        token = await bounded(lambda: token_of(self._plan.token_file, env.slack_token(), key=key))
        if token is None:
            raise Refused(f"there is no token for Slack: set {key} or NVRX_SLURM_SLACK_TOKEN")
        return await self._http.send(
            "POST",
            f"{self._plan.url.rstrip('/')}/chat.postMessage",
            content=content,
            content_type="application/json; charset=utf-8",
            authorization=f"Bearer {token}",
        )

    async def _kept(self) -> Thread:
        with contextlib.suppress(OSError, MalformedRecord):
            thread = decode_json(Thread, await bounded(self._path.read_bytes), "the thread")
            if thread.channel == self._plan.channel:
                return thread
        return Thread(channel=self._plan.channel)

    async def _keep(self, thread: Thread) -> None:
        self._thread = thread
        try:
            await bounded(lambda: write_private(self._path, msgspec.json.encode(thread)))
        except OSError as error:
            log.warning("slack: %s could not be kept (%s): a later process begins a new thread", self._path, error)


def _reply(answer: Answer) -> Reply:
    if answer.status != 200:
        raise Refused(f"Slack says {answer.status}: check slack.url")
    try:
        return decode_json(Reply, answer.body, "Slack's answer")
    except MalformedRecord:
        raise Later("Slack's answer is not one of Slack's: a proxy may have given it") from None
