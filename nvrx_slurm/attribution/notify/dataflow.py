"""An index in the manner of Elasticsearch or OpenSearch: a document for each decided failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from nvrx_slurm.attribution.http_client import HttpReply, PermanentError, RetryableError, token_of
from nvrx_slurm.attribution.notify.base import DecidedFailure, DeliveryLimits, Message, ReceiverHttp, bounded
from nvrx_slurm.attribution.notify.format import document, shortened
from nvrx_slurm.errors import MalformedRecord
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.model import DataflowSpec
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.decoding import decode_json

BATCH = 50
_THERE_ALREADY = 409
_TOO_LARGE = 413
_OF_THE_DOCUMENT = (400, _TOO_LARGE)
_TRY_AGAIN = (408, 429)
# Of what the index says to a document.
_WORDS_CHARS = 200


class BulkItem(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one of many documents."""

    id: str = msgspec.field(name="_id")
    status: int
    error: Any = None


class BulkReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `_bulk`."""

    items: list[dict[str, BulkItem]]


class DataflowReceiver:
    """Each document is created under its failure's own id: a document that is sent again exists already (409), which
    counts as delivered."""

    name, batch = "dataflow", BATCH

    def __init__(
        self, plan: DataflowSpec, *, name: str, cluster: str | None, limits: DeliveryLimits, clock: Clock
    ) -> None:
        self._plan, self._job_name, self._cluster, self._clock = plan, name, cluster, clock
        self._base = f"{plan.url.rstrip('/')}/{quote(plan.index, safe='')}"
        self._http = ReceiverHttp("the index", limits=limits, clock=clock)

    def body(self, decided: DecidedFailure) -> bytes:
        now = self._clock.wall()
        return msgspec.json.encode(document(decided, name=self._job_name, cluster=self._cluster, now=now))

    async def deliver(self, messages: Sequence[Message]) -> Mapping[str, str | None]:
        outcome: dict[str, str | None] = {}
        sound: list[Message] = []
        for message in messages:
            try:
                decode_json(dict, message.body, "a document")
                sound.append(message)
            except MalformedRecord:
                outcome[message.identity] = "the spooled message is no document"
        return outcome | await self._create(sound) if sound else outcome

    async def close(self) -> None:
        await self._http.close()

    async def _create(self, messages: Sequence[Message]) -> dict[str, str | None]:
        if len(messages) == 1:
            identity = messages[0].identity
            # `create`, not `index`: data streams accept nothing else.
            url = f"{self._base}/_doc/{quote(identity, safe='')}?op_type=create"
            answer = await self._send("PUT", url, messages[0].body, "application/json")
            return _outcome(identity, answer.status, answer.body.decode(errors="replace"))
        content = b"".join(
            msgspec.json.encode({"create": {"_id": message.identity}})
            + b"\n"
            # On one line, whatever the file in the spool holds: in a bulk request a newline ends the document.
            + msgspec.json.format(message.body, indent=-1)
            + b"\n"
            for message in messages
        )
        answer = await self._send("POST", f"{self._base}/_bulk", content, "application/x-ndjson")
        if answer.status == _TOO_LARGE:  # all of them together: a proxy may allow a megabyte
            half = len(messages) // 2
            return await self._create(messages[:half]) | await self._create(messages[half:])
        if answer.status != 200:
            raise PermanentError(_refusal(answer.status, answer.body.decode(errors="replace")))
        try:
            items = decode_json(BulkReply, answer.body, "the index's answer").items
        except MalformedRecord:
            raise RetryableError("the reply is not one of an index: a proxy may have sent it") from None
        found: dict[str, str | None] = {}
        for item in (item for each in items for item in each.values()):
            if item.status < 500 and item.status not in _TRY_AGAIN:  # else it stays in the spool
                found |= _outcome(item.id, item.status, str(item.error))
        return found

    async def _send(self, method: str, url: str, content: bytes, content_type: str) -> HttpReply:
        key = "fault_tolerance.attribution.dataflow.token_file"
        token = await bounded(lambda: token_of(self._plan.token_file, env.get(env.DATAFLOW_TOKEN), key=key))
        # `ApiKey …` and `Basic …` name their scheme themselves
        authorization = token if token is None or " " in token else f"Bearer {token}"
        return await self._http.send(
            method, url, content=content, content_type=content_type, authorization=authorization
        )


def _outcome(identity: str, status: int, text: str) -> dict[str, str | None]:
    """Raises PermanentError if every other document would fail in the same way."""
    if status < 300 or status == _THERE_ALREADY:
        return {identity: None}
    if status in _OF_THE_DOCUMENT:
        return {identity: f"the index answers {status}: {shortened(text, _WORDS_CHARS)}"}
    raise PermanentError(_refusal(status, text))


def _refusal(status: int, text: str) -> str:
    todo = {
        401: "check dataflow.token_file or NVRX_SLURM_DATAFLOW_TOKEN",
        403: "the token may not create documents there",
        404: "check dataflow.url and dataflow.index: there is no such index, and none is created automatically",
    }.get(status, "check dataflow.url")
    return f"the index refuses ({status}: {shortened(text, _WORDS_CHARS)}): {todo}"
