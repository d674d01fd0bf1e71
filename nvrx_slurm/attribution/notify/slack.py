"""Slack: a message for each decided failure, all of one job in one thread."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from nvrx_slurm.attribution.http_client import PermanentError, RetryableError, token_of
from nvrx_slurm.attribution.notify.base import DecidedFailure, DeliveryLimits, Message, ReceiverHttp, bounded
from nvrx_slurm.attribution.notify.format import slack_message
from nvrx_slurm.errors import MalformedRecord
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.model import SlackSpec
from nvrx_slurm.journal.verdicts import Wire
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.decoding import decode_json
from nvrx_slurm.util.files import write_private
from nvrx_slurm.util.log import get_logger

log = get_logger("postprocessing")

MOST_REPORTED = 256

# Errors of `chat.postMessage` (its reference page, "Errors"), by what they concern.
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


class SlackThread(Wire, frozen=True, kw_only=True):
    """The job's thread, kept in its folder: where it is, and which failures are reported in it, newest last."""

    channel: str  # as the plan names it
    channel_id: str = ""
    ts: str | None = None
    reported: tuple[str, ...] = msgspec.field(default=(), name="told")  # the key in slack.json


class SlackReply(msgspec.Struct, frozen=True, kw_only=True):
    """What Slack answers."""

    ok: bool
    error: str = ""
    channel: str = ""
    ts: str = ""


class SlackReceiver:
    """Messages in the order of failures. One whose reply was lost may arrive twice: Slack accepts no id that the
    sender chooses."""

    name, batch = "slack", 1

    def __init__(self, plan: SlackSpec, folder: Path, *, name: str, limits: DeliveryLimits, clock: Clock) -> None:
        self._plan, self._job_name = plan, name
        self._path = folder / "slack.json"
        self._http = ReceiverHttp("Slack", limits=limits, clock=clock)
        self._thread: SlackThread | None = None

    def body(self, decided: DecidedFailure) -> bytes:
        plan = self._plan
        message = slack_message(decided, channel=plan.channel, mention=plan.mention, name=self._job_name)
        return msgspec.json.encode(message)

    async def deliver(self, messages: Sequence[Message]) -> Mapping[str, str | None]:
        (message,) = messages
        thread = self._thread
        if thread is None:
            thread = self._thread = SlackThread(channel=self._plan.channel)
            with contextlib.suppress(OSError, MalformedRecord):
                kept = decode_json(SlackThread, await bounded(self._path.read_bytes), "the thread")
                if kept.channel == self._plan.channel:
                    thread = self._thread = kept
        if message.identity in thread.reported:
            return {message.identity: None}
        try:
            arguments = decode_json(dict[str, Any], message.body, "the message")
        except MalformedRecord:
            return {message.identity: "the spooled message is not valid"}
        return {message.identity: await self._post(arguments, message.identity, thread)}

    async def close(self) -> None:
        await self._http.close()

    async def _post(self, message: dict[str, Any], identity: str, thread: SlackThread) -> str | None:
        key = "fault_tolerance.attribution.slack.token_file"
        token = await bounded(lambda: token_of(self._plan.token_file, env.get(env.SLACK_TOKEN), key=key))
        if token is None:
            raise PermanentError(f"there is no token for Slack: set {key} or NVRX_SLURM_SLACK_TOKEN")
        if thread.ts is not None:
            # By its id: a channel that was renamed has another name, and the thread stays in it.
            message = {**message, "channel": thread.channel_id or message["channel"], "thread_ts": thread.ts}
        http = await self._http.send(
            "POST",
            f"{self._plan.url.rstrip('/')}/chat.postMessage",
            content=msgspec.json.encode(message),
            content_type="application/json; charset=utf-8",
            authorization=f"Bearer {token}",
        )
        if http.status != 200:
            raise PermanentError(f"Slack answers {http.status}: check slack.url")
        try:
            reply = decode_json(SlackReply, http.body, "Slack's answer")
        except MalformedRecord:
            raise RetryableError("the reply is not one of Slack's: a proxy may have sent it") from None
        if reply.ok:
            # Kept before the message leaves the spool: a crash between the two does not post it again.
            first = thread if thread.ts else msgspec.structs.replace(thread, channel_id=reply.channel, ts=reply.ts)
            await self._keep(msgspec.structs.replace(first, reported=(*thread.reported, identity)[-MOST_REPORTED:]))
            return None
        if reply.error in _OF_THE_MESSAGE:
            return f"Slack answers {reply.error}"
        if thread.ts is not None and reply.error in _OF_THE_THREAD:
            await self._keep(msgspec.structs.replace(thread, channel_id="", ts=None))
            raise RetryableError(f"Slack rejects the previous thread ({reply.error}): a new one is started")
        if reply.error in _AWAY:
            raise RetryableError(f"Slack answers {reply.error}")
        todo = _WHAT_TO_DO.get(reply.error, "see Slack's reference of chat.postMessage")
        raise PermanentError(f"Slack refuses ({reply.error}): {todo}")

    async def _keep(self, thread: SlackThread) -> None:
        self._thread = thread
        try:
            await bounded(lambda: write_private(self._path, msgspec.json.encode(thread)))
        except OSError as error:
            log.warning("slack: %s could not be written (%s): a later process starts a new thread", self._path, error)
