"""An index in the manner of Elasticsearch or OpenSearch: a document for each decided failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from nvrx_slurm.attribution.notify.decided import Decided
from nvrx_slurm.attribution.notify.http import Answer, Http
from nvrx_slurm.attribution.notify.receiver import Later, Patience, Refused, bounded
from nvrx_slurm.attribution.notify.secrets import token_of
from nvrx_slurm.attribution.notify.spool import Parcel
from nvrx_slurm.attribution.notify.telling import document
from nvrx_slurm.errors import MalformedRecord
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.model import DataflowSpec
from nvrx_slurm.util.clock import Clock
from nvrx_slurm.util.decoding import decode_json

BATCH = 50
_THERE_ALREADY = 409
_OF_THE_DOCUMENT = (400, 413)
_TRY_AGAIN = (408, 429)


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one document of many."""

    id: str = msgspec.field(name="_id")
    status: int
    error: Any = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `_bulk`."""

    items: list[dict[str, Item]]


class Dataflow:
    """Each document is created under its failure's own id: what is sent again is there already, and that is well.

    So it works on data streams too, which take nothing but `create`.
    """

    name, batch = "dataflow", BATCH

    def __init__(
        self, plan: DataflowSpec, *, name: str, cluster: str | None, patience: Patience, clock: Clock
    ) -> None:
        self._plan, self._job_name, self._cluster, self._clock = plan, name, cluster, clock
        self._base = f"{plan.url.rstrip('/')}/{quote(plan.index, safe='')}"
        self._http = Http("the index", patience=patience, clock=clock)

    def body(self, decided: Decided) -> bytes:
        now = self._clock.wall()
        return msgspec.json.encode(document(decided, name=self._job_name, cluster=self._cluster, now=now))

    async def deliver(self, parcels: Sequence[Parcel]) -> Mapping[str, str | None]:
        sound = [parcel for parcel in parcels if _is_document(parcel.body)]
        outcome: dict[str, str | None] = {
            parcel.identity: "what waits in the spool is no document" for parcel in parcels if parcel not in sound
        }
        if len(sound) == 1:
            outcome |= await self._create(sound[0])
        elif sound:
            outcome |= await self._create_all(sound)
        return outcome

    async def close(self) -> None:
        await self._http.close()

    async def _create(self, parcel: Parcel) -> Mapping[str, str | None]:
        url = f"{self._base}/_doc/{quote(parcel.identity, safe='')}?op_type=create"
        answer = await self._send("PUT", url, parcel.body, "application/json")
        return _judged(parcel.identity, answer.status, answer.body.decode(errors="replace"))

    async def _create_all(self, parcels: Sequence[Parcel]) -> Mapping[str, str | None]:
        lines = [
            line
            for parcel in parcels
            for line in (msgspec.json.encode({"create": {"_id": parcel.identity}}), _on_one_line(parcel.body))
        ]
        content = b"\n".join(lines) + b"\n"
        answer = await self._send("POST", f"{self._base}/_bulk", content, "application/x-ndjson")
        if answer.status != 200:
            raise Refused(_refusal(answer.status, answer.body.decode(errors="replace")))
        try:
            items = decode_json(Outcome, answer.body, "the index's answer").items
        except MalformedRecord:
            raise Later("the index's answer is not one of an index: a proxy may have given it") from None
        found: dict[str, str | None] = {}
        for item in (item for each in items for item in each.values()):
            if item.status < 500 and item.status not in _TRY_AGAIN:  # else it stays in the spool
                found |= _judged(item.id, item.status, str(item.error))
        return found

    async def _send(self, method: str, url: str, content: bytes, content_type: str) -> Answer:
        key = "fault_tolerance.attribution.dataflow.token_file"
        token = await bounded(lambda: token_of(self._plan.token_file, env.dataflow_token(), key=key))
        # `ApiKey …` and `Basic …` say for themselves what they are
        authorization = token if token is None or " " in token else f"Bearer {token}"
        return await self._http.send(
            method, url, content=content, content_type=content_type, authorization=authorization
        )


def _judged(identity: str, status: int, text: str) -> Mapping[str, str | None]:
    """Raises Refused where every other document would fare the same."""
    if status < 300 or status == _THERE_ALREADY:
        return {identity: None}
    if status in _OF_THE_DOCUMENT:
        return {identity: f"the index says {status}: {_short(text)}"}
    raise Refused(_refusal(status, text))


def _refusal(status: int, text: str) -> str:
    todo = {
        401: "check dataflow.token_file or NVRX_SLURM_DATAFLOW_TOKEN",
        403: "the token may not create documents there",
        404: "check dataflow.url and dataflow.index: there is no such index, and none is made by itself",
    }.get(status, "check dataflow.url")
    return f"the index refuses ({status}: {_short(text)}): {todo}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:199] + "…"


def _is_document(body: bytes) -> bool:
    try:
        return isinstance(decode_json(dict, body, "a document"), dict)
    except MalformedRecord:
        return False


def _on_one_line(body: bytes) -> bytes:
    return msgspec.json.format(body, indent=-1)
