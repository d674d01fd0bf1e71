"""Asks the endpoint; whatever goes wrong there leaves the rules' verdict as it is, with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from nvrx_slurm.attribution.notify.secrets import token_of
from nvrx_slurm.attribution.second_opinion.merging import gives_orders, merged
from nvrx_slurm.attribution.second_opinion.question import Opinion, Request, answer_in, excerpt, question, request
from nvrx_slurm.attribution.second_opinion.redaction import redacted
from nvrx_slurm.errors import ConfigError, MalformedRecord, SourceError
from nvrx_slurm.jobspec import env
from nvrx_slurm.journal.verdicts import Attribution, Inquiry, LlmPlan, Verdict
from nvrx_slurm.util.decoding import decode
from nvrx_slurm.util.threads import in_thread

if TYPE_CHECKING:
    import httpx2

MOST_BYTES = 1 << 20
"""A reply that is longer is none."""


_OTHER_FORM = "the reply is not in the form that was asked for"
_OPINION = msgspec.json.Decoder(Opinion)


class SecondOpinion:
    """One endpoint. `on` never raises for what the endpoint does, and takes `plan.timeout_s` at most."""

    def __init__(self, plan: LlmPlan) -> None:
        self._plan = plan
        self._client: httpx2.AsyncClient | None = None

    async def on(self, rules_say: Attribution, inquiry: Inquiry, tails: Mapping[str, Sequence[str]]) -> Attribution:
        """The rules' answer, filled in where they do not know. `tails`: file → its last lines, the telling first."""
        if rules_say.verdict is not Verdict.UNKNOWN or not tails:
            return rules_say
        shown = excerpt(tails, partial(redacted, nodes=inquiry.nodes))
        if gives_orders(shown):
            return _without(rules_say, "a line of the log tries to give the model orders")
        try:
            async with asyncio.timeout(self._plan.timeout_s):
                opinion = await self._ask(question(shown, rules_say, inquiry))
        except TimeoutError:
            return _without(rules_say, f"no answer within {self._plan.timeout_s:g} s")
        except (SourceError, ConfigError) as error:
            return _without(rules_say, str(error))
        return merged(rules_say, opinion, shown, self._plan.model)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _ask(self, text: str) -> Opinion:
        key = await asyncio.wrap_future(in_thread(self._key, "read key"))  # its file system may not answer
        reply = await self._post(request(self._plan, key, text))
        try:
            answer = decode(lambda data: answer_in(self._plan, msgspec.json.decode(data)), reply, "the reply")
            return decode(_OPINION.decode, answer, "the opinion")
        except MalformedRecord as error:
            raise SourceError(f"{_OTHER_FORM}: {error}") from None

    async def _post(self, asked: Request) -> bytes:
        import httpx2

        if self._client is None:
            self._client = httpx2.AsyncClient(timeout=self._plan.timeout_s, follow_redirects=False)
        body = bytearray()
        try:
            async with self._client.stream("POST", asked.url, headers=asked.headers, json=asked.body) as response:
                if response.status_code != 200:
                    raise SourceError(f"{asked.url} answers {response.status_code}")
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > MOST_BYTES:
                        raise SourceError(f"the reply is longer than {MOST_BYTES >> 20} MiB")
        except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:
            raise SourceError(f"{asked.url}: {error or type(error).__name__}") from None
        return bytes(body)

    def _key(self) -> str | None:
        """Read at each question: keys are rotated. Raises ConfigError."""
        return token_of(self._plan.key_file, env.llm_key(), key="fault_tolerance.attribution.llm.key_file")


def _without(rules_say: Attribution, why: str) -> Attribution:
    return replace(rules_say, problem=f"no second opinion: {why}")
