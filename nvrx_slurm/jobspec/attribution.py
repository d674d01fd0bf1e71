"""The keys below `fault_tolerance.attribution`: who is asked why a job failed, and what follows from the answer."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema, model_validator

from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.block import Block
from nvrx_slurm.jobspec.urls import check_redis_url, is_redis, parse_url
from nvrx_slurm.jobspec.values import Command, Duration, Line, Misfit, Switch
from nvrx_slurm.journal.verdicts import Aggregation

_HERE = "fault_tolerance.attribution"
_URL_SCHEMA = {"type": "string", "format": "uri", "pattern": "^https?://", "examples": ["https://host:8443"]}


def _url(key: str, variable: str) -> AfterValidator:
    """`key` and `variable`: where the token of such a service belongs."""
    place = f"put the token into a file (mode 0600) named by {_HERE}.{key}, or into {variable}"
    return AfterValidator(lambda text: parse_url(text, token_goes_to=place))


def _several(value: object) -> object:
    """One alone needs no list around it."""
    return [value] if isinstance(value, str) else value


def _ledger(text: str) -> str:
    return check_redis_url(text, password_goes_to=f"put it into {env.STORE_PASSWORD}") if is_redis(text) else text


ServiceUrl = Annotated[Line, _url("token_file", env.ATTRSVC_TOKEN), WithJsonSchema(_URL_SCHEMA)]
SlackUrl = Annotated[Line, _url("slack.token_file", env.SLACK_TOKEN), WithJsonSchema(_URL_SCHEMA)]
DataflowUrl = Annotated[Line, _url("dataflow.token_file", env.DATAFLOW_TOKEN), WithJsonSchema(_URL_SCHEMA)]
LlmUrl = Annotated[Line, _url("llm.key_file", env.LLM_KEY), WithJsonSchema(_URL_SCHEMA)]
_SEVERAL = WithJsonSchema({"type": ["string", "array"], "items": {"type": "string"}})
ServiceUrls = Annotated[tuple[ServiceUrl, ...], BeforeValidator(_several), _SEVERAL]
Files = Annotated[tuple[Line, ...], BeforeValidator(_several), _SEVERAL]


class Llm(Block):
    """A second opinion, by a language model; it sees an excerpt of the logs in which secrets are blacked out."""

    url: LlmUrl
    """Its endpoint, up to and including the version: `https://api.example/v1`."""
    model: Line
    """Which model to ask."""
    key_file: Line | None = None
    """A file (mode 0600) with the key; or set NVRX_SLURM_LLM_KEY."""
    style: Literal["openai", "anthropic"] = "openai"
    """Whose API the endpoint speaks."""
    timeout: Duration = 20.0
    """How long its answer is waited for. Without one the rules' verdict stands."""


class Slack(Block):
    """A message about each failure that was decided on; one thread for each job."""

    channel: Line
    """Where it goes: a channel's name or id."""
    token_file: Line | None = None
    """A file (mode 0600) with the app's token; or set NVRX_SLURM_SLACK_TOKEN."""
    mention: Line | None = None
    """Whom the message names: a member's id, or `@here`."""
    url: SlackUrl = "https://slack.com/api"
    """Slack's API, or what stands in for it."""


class Dataflow(Block):
    """One JSON document for each failure that was decided on, in an index of the kind that Elasticsearch keeps."""

    url: DataflowUrl
    """Where the index is."""
    index: Line
    """Its name."""
    token_file: Line | None = None
    """A file (mode 0600) with the token; or set NVRX_SLURM_DATAFLOW_TOKEN."""


class AttributionSpec(Block):
    """Why something failed, and so whether a restart can help. Sources are asked at once, while the nodes get ready.

    No answer in time, or none that says so clearly, is a restart.
    """

    attrsvc_url: ServiceUrl | None = None
    """Ask the attribution service there (`nvrx-slurm attrsvc`)."""
    manage_attrsvc: Switch = False
    """Ask one that the batch host starts for this job, and ends with it."""
    enable_lib: Switch = True
    """Ask the rules that come with this tool, on the batch host."""
    enable_mcp: Switch = False
    """Ask an MCP server, which the batch host starts."""
    mcp_command: Command | None = None
    """The command of that server, if it is not `nvrx-slurm mcp`."""
    http_urls: ServiceUrls = ()
    """Ask these services too; they speak as `nvrx-slurm attrsvc` does."""
    token_file: Line | None = None
    """A file (mode 0600) with the token for all of these services; or set NVRX_SLURM_ATTRSVC_TOKEN."""
    timeout: Duration = 60.0
    """How long one source may take. What comes after `decision_timeout` is recorded, and decides nothing."""
    decision_timeout: Duration = 10.0
    """How long a restart waits for the sources, counted from the failure. Not set: at most `timeout` and
    `rendezvous.join_timeout`."""
    dry_run: Switch = True
    """Record what would have been decided, and restart all the same; nothing waits."""
    aggregation: Aggregation = "any"
    """How many sources must say STOP: one, or every one; then one that fails or is late is against it."""
    rules: Files = ()
    """Rule files of your own, beside those that come with this tool."""
    llm: Llm | None = None
    """A second opinion; see below."""
    slack: Slack | None = None
    """Tell a Slack channel; see below."""
    dataflow: Dataflow | None = None
    """Keep a document of it; see below."""
    ledger: Annotated[Line, AfterValidator(_ledger)] | None = None
    """Where nodes that are suspect are remembered from job to job: a file, or `redis://host:port/db` of your own. Not
    set: a file in your home."""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.manage_attrsvc and self.attrsvc_url is not None:
            raise Misfit(
                f"starts a service for this job, and {_HERE}.attrsvc_url names one that runs: set one of the two",
                "manage_attrsvc",
            )
        self._check_twice()
        return self

    def _check_twice(self) -> None:
        """A service that is asked twice would have two votes."""
        seen = {self.attrsvc_url}
        for url in self.http_urls:
            if url in seen:
                raise Misfit(f"names {url} a second time; each service is asked once", "http_urls")
            seen.add(url)
