"""The keys of job.yaml: what each means, its type, its default, and how they must relate.

This is the one declaration of each key: job.yaml is read by it (`reading`), plan.json holds its blocks, and
docs/job-yaml.md and the JSON Schema are written from it. Durations are seconds, sizes are bytes.
"""

import re
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from msgspec import field
from msgspec.structs import force_setattr, replace

from nvrx_slurm.jobspec.budgets import AFTER_GRACE_S, least_notice_s, most_notice_s, notice_s
from nvrx_slurm.jobspec.container import ContainerSpec
from nvrx_slurm.jobspec.prewarm import PrewarmSpec
from nvrx_slurm.jobspec.reading import After, Block, Misfit, Schema, checked, keys_of
from nvrx_slurm.jobspec.urls import check_redis_url, parse_url
from nvrx_slurm.jobspec.values import (
    AS_LIST,
    MOST_NODES,
    TEXT_OR_LIST,
    Allowance,
    Command,
    CountOrRate,
    Duration,
    Environment,
    Extra,
    Factor,
    Gpus,
    Line,
    Lines,
    LogName,
    Name,
    Nodes,
    NonEmpty,
    Pause,
    Positive,
    SignalName,
    Size,
    Spares,
    Switch,
    TimeLimit,
    Workers,
)
from nvrx_slurm.util.durations import words

OnFailure = Literal["restart_replica", "restart_job", "ignore", "fail_job"]
# How many of the sources must answer STOP: one, or every one of them.
Aggregation = Literal["any", "all"]

FENCE_MARGIN_S = 2.0
_RANGE = re.compile(r"(\d{1,6})\.\.(\d{1,6})", re.ASCII)
_SPARES = Schema(
    {
        "type": ["integer", "string"],
        "minimum": 0,
        "maximum": MOST_NODES,
        "pattern": r"^\d+\.\.\d+$",
        "examples": [2, "0..2"],
    }
)

# key → what it is not, `shorter` or `longer`, when it is not set, than any of these keys.
FOLLOWS: dict[tuple[str | int, ...], tuple[str, tuple[tuple[str, ...], ...]]] = {
    ("fault_tolerance", *key): (relation, tuple(("fault_tolerance", *leader) for leader in leaders))
    for key, relation, leaders in (
        (("heartbeat", "startup_timeout"), "shorter", (("heartbeat", "timeout"),)),
        (("fence_timeout",), "shorter", (("heartbeat", "timeout"),)),
        (("control_plane_grace",), "shorter", (("fence_timeout",),)),
        (("attribution", "decision_timeout"), "longer", (("attribution", "timeout"), ("rendezvous", "join_timeout"))),
    )
}


_SHORT_PREWARM = {"type": ["string", "boolean", "array"], "items": {"type": "string"}}


def _or(short_form: Mapping[str, Any], block: str) -> Schema:
    """The block, or its short form."""
    return Schema({"anyOf": [{"$ref": f"#/$defs/{block}"}, short_form]})


def _unfit(rule: str, other_s: float, seen_s: float, *path: str) -> Misfit:
    return Misfit(f"{rule} ({words(other_s)}), not {words(seen_s)}", *path)


def _check_min_nodes(min_nodes: int | None, nodes: int, key: str) -> None:
    if min_nodes is not None and min_nodes > nodes:
        raise Misfit(f"must be at most `{key}` ({nodes}), not {min_nodes}", "min_nodes")


# ------------------------------------------------------------------------------------------------------- attribution


_HERE = "fault_tolerance.attribution"
_IS_URL = Schema({"type": "string", "format": "uri", "pattern": "^https?://", "examples": ["https://host:8443"]})


def _url(key: str, variable: str) -> After:
    """`key` and `variable`: where the token of such a service belongs."""
    place = f"put the token into a file (mode 0600) named by {_HERE}.{key}, or into {variable}"
    return After(lambda text: parse_url(text, token_goes_to=place))


def _ledger(text: str) -> str:
    # Any other URL would be the path of a file, below a folder named `http:`.
    return check_redis_url(text, password_goes_to="put it into NVRX_SLURM_STORE_PASSWORD") if "://" in text else text


ServiceUrl = Annotated[Line, _url("token_file", "NVRX_SLURM_ATTRSVC_TOKEN"), _IS_URL]


class LlmSpec(Block, frozen=True, kw_only=True):
    """A second opinion, by a language model; it gets an excerpt of the logs in which secrets are blacked out."""

    url: Annotated[
        Annotated[Line, _url("llm.key_file", "NVRX_SLURM_LLM_KEY"), _IS_URL],
        "Its endpoint, up to and including the version: `https://api.example/v1`.",
    ]
    model: Annotated[Line, "Which model to ask."]
    key_file: Annotated[Line | None, "A file (mode 0600) with the key; or set NVRX_SLURM_LLM_KEY."] = None
    style: Annotated[Literal["openai", "anthropic"], "Which API the endpoint has."] = "openai"
    timeout: Annotated[Duration, "How long the job waits for its answer. Without one the rules' verdict stands."] = (
        20.0
    )


class SlackSpec(Block, frozen=True, kw_only=True):
    """A message about each decision on a failure; one thread for each job."""

    channel: Annotated[Line, "Where it goes: a channel's name or id."]
    token_file: Annotated[
        Line | None,
        "A file (mode 0600) with the app's token; or set NVRX_SLURM_SLACK_TOKEN.",
    ] = None
    mention: Annotated[Line | None, "The member that the message mentions: an id, or `@here`."] = None
    url: Annotated[
        Annotated[Line, _url("slack.token_file", "NVRX_SLURM_SLACK_TOKEN"), _IS_URL],
        "The URL of Slack's API, or of a replacement.",
    ] = "https://slack.com/api"


class DataflowSpec(Block, frozen=True, kw_only=True):
    """One JSON document for each decision on a failure, in an index of the kind that Elasticsearch keeps."""

    url: Annotated[
        Annotated[Line, _url("dataflow.token_file", "NVRX_SLURM_DATAFLOW_TOKEN"), _IS_URL], "Where the index is."
    ]
    index: Annotated[Line, "Its name."]
    token_file: Annotated[Line | None, "A file (mode 0600) with the token; or set NVRX_SLURM_DATAFLOW_TOKEN."] = None


class AttributionSpec(Block, frozen=True, kw_only=True):
    """Why something failed, and so whether a restart can help. The job asks all sources at once, while the nodes get
    ready. It stops only on a clear STOP that arrives in time; otherwise it restarts.
    """

    attrsvc_url: Annotated[ServiceUrl | None, "Ask the attribution service there (`nvrx-slurm attrsvc`)."] = None
    manage_attrsvc: Annotated[Switch, "Ask a service that the batch host starts for this job, and ends with it."] = (
        False
    )
    enable_lib: Annotated[Switch, "Ask the built-in rules, on the batch host. Answers name this source `lib`."] = True
    enable_mcp: Annotated[Switch, "Ask an MCP server, which the batch host starts."] = False
    mcp_command: Annotated[Command | None, "The command of that server, if it is not `nvrx-slurm mcp`."] = None
    http_urls: Annotated[
        Annotated[tuple[ServiceUrl, ...], AS_LIST, TEXT_OR_LIST],
        "Ask these services too; they have the API of `nvrx-slurm attrsvc`.",
    ] = ()
    token_file: Annotated[
        Line | None,
        "A file (mode 0600) with the token for all of these services; or set NVRX_SLURM_ATTRSVC_TOKEN.",
    ] = None
    timeout: Annotated[
        Duration,
        "How long one source may take. An answer after `decision_timeout` is recorded, and decides nothing.",
    ] = 60.0
    decision_timeout: Annotated[
        Duration,
        "How long a restart waits for the sources, counted from the failure. Not set: at most `timeout` and "
        "`rendezvous.join_timeout`.",
    ] = 10.0
    dry_run: Annotated[Switch, "Record the verdict, but restart in any case; no restart waits for it."] = True
    aggregation: Annotated[
        Aggregation,
        "How many sources must answer STOP: one, or every one. With `all`, a failed or late source prevents it.",
    ] = "any"
    rules: Annotated[
        Annotated[tuple[NonEmpty, ...], AS_LIST, TEXT_OR_LIST],
        "Your own rule files, in addition to the built-in rules.",
    ] = ()
    llm: Annotated[LlmSpec | None, "A second opinion; see below."] = None
    slack: Annotated[SlackSpec | None, "Send a message to a Slack channel; see below."] = None
    dataflow: Annotated[DataflowSpec | None, "Send a document to an index; see below."] = None
    ledger: Annotated[
        Annotated[Line, After(_ledger)] | None,
        "Where jobs record suspect nodes for later jobs: a file, or `redis://host:port/db` of your own. Not set: "
        "a file in your home.",
    ] = None

    def settled(self, said: Mapping[str, Any]) -> Self:
        if self.manage_attrsvc and self.attrsvc_url is not None:
            raise Misfit(
                f"starts a service for this job, and {_HERE}.attrsvc_url names one that runs: set one of the two",
                "manage_attrsvc",
            )
        seen = {self.attrsvc_url}  # a service that is asked twice would have two votes
        for url in self.http_urls:
            if url in seen:
                raise Misfit(f"names {url} a second time; each service is asked once", "http_urls")
            seen.add(url)
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of all sources, in the order in which they are listed."""
        services = ("attrsvc",) if self.attrsvc_url or self.manage_attrsvc else ()
        own = [name for name, on in (("lib", self.enable_lib), ("mcp", self.enable_mcp)) if on]
        return (*own, *services, *self.http_urls)

    @property
    def acts(self) -> bool:
        """Whether a verdict can stop the job, so that a rendezvous waits for it."""
        return bool(self.sources) and not self.dry_run


# --------------------------------------------------------------------------------------------------- fault_tolerance


def _one_group(text: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # its meaning may change in a later Python
            groups = re.compile(text.encode()).groups  # logs are bytes
    except (re.error, OverflowError, RecursionError, FutureWarning) as error:
        raise ValueError(f"is no regular expression: {error}") from None
    if groups != 1:
        raise ValueError(f"must have one group, around the step, not {groups}: such as 'iteration +([0-9]+)/'")
    return text


class HeartbeatSpec(Block, frozen=True, kw_only=True):
    """Heartbeats between agents and controller."""

    interval: Annotated[Duration, "How often an agent sends one."] = 1.0
    timeout: Annotated[
        Duration,
        "After how long without a heartbeat a node is lost. A broken connection is noticed at once.",
    ] = 15.0
    startup_timeout: Annotated[
        Duration,
        "The same for the first heartbeat after a node has registered; an unregistered node has no deadline. "
        "Not set: at least `timeout`.",
    ] = 60.0

    def settled(self, said: Mapping[str, Any]) -> Self:
        block = self
        if "startup_timeout" not in said:
            block = replace(self, startup_timeout=max(self.startup_timeout, self.timeout))
        if block.interval >= block.timeout:
            raise _unfit("must be shorter than heartbeat.timeout", block.timeout, block.interval, "interval")
        if block.startup_timeout < block.timeout:
            raise _unfit(
                "must be at least heartbeat.timeout", block.timeout, block.startup_timeout, "startup_timeout"
            )
        return block


class RendezvousSpec(Block, frozen=True, kw_only=True):
    """How the nodes of a cycle meet: a rendezvous."""

    join_timeout: Annotated[
        Duration,
        "How long a rendezvous may stay open. Then the job goes on with `min_nodes`, or ends with 75.",
    ] = 600.0
    last_call: Annotated[
        Pause,
        "How long a late node of the last cycle takes precedence over a hot spare that is ready.",
    ] = 5.0


class TeardownSpec(Block, frozen=True, kw_only=True):
    """How workers are stopped."""

    grace: Annotated[
        Pause,
        "From the first signal to SIGKILL, for a worker and all its children: the whole budget. When the "
        "job is cancelled or preempted, at most Slurm's KillWait less 8 s (half of it, if that is more).",
    ] = 10.0
    stop_signal: Annotated[SignalName, "The first signal."] = "SIGTERM"
    checkpoint_signal: Annotated[
        SignalName | None,
        "The signal that asks workers, ahead of the time limit, to save their state.",
    ] = None
    checkpoint_timeout: Annotated[Duration, "How long workers get to save."] = 60.0
    gpu_memory_below: Annotated[
        Size | None,
        "Before workers start again, wait until each GPU of the node uses less than this.",
    ] = None
    gpu_reclaim_timeout: Annotated[Duration, "How long the node waits for that; then workers start in any case."] = (
        50.0
    )

    def settled(self, said: Mapping[str, Any]) -> Self:
        if self.checkpoint_signal == self.stop_signal:
            raise Misfit(
                f"must differ from teardown.stop_signal ({self.stop_signal}): workers could not distinguish them",
                "checkpoint_signal",
            )
        return self

    @property
    def checkpoint_s(self) -> float:
        """How long workers get to save ahead of the time limit; 0 where they are not asked to."""
        return self.checkpoint_timeout if self.checkpoint_signal else 0.0

    def notice_s(self, time_limit_s: float | None) -> int:
        """How long before its time limit the job is signalled, so that it can save and tear down."""
        return notice_s(self.grace, self.checkpoint_s, time_limit_s)


class HangSpec(Block, frozen=True, kw_only=True):
    """When a live worker counts as hung: its stacks are recorded, and it is stopped. Not set: never."""

    startup_timeout: Annotated[Duration | None, "From a worker's start to its first `workload.beat()`."] = None
    step_timeout: Annotated[
        Duration | None,
        "Between two signs of progress, outside of sections, which have deadlines of their own.",
    ] = None
    no_output: Annotated[Duration | None, "Without a line of output; needs no change to the workers' code."] = None
    exit_skew: Annotated[
        Duration | None,
        "How long others may go on once one rank has ended with exit code 0.",
    ] = None
    learn: Annotated[
        Switch,
        "Where no bound is set, take one from the run: the longest time so far, multiplied by `safety_factor`.",
    ] = False
    safety_factor: Annotated[Factor, "The learned bound, as a multiple of the longest time so far."] = 5.0
    warmup: Annotated[Positive, "How many times the run must have measured before it learns a bound."] = 50


class BackoffSpec(Block, frozen=True, kw_only=True):
    """How a crash loop is slowed down: cycles in a row in which a worker fails soon after the start, without a new
    step. A lost node does not count. With `backoff: off` every restart is immediate."""

    after: Annotated[Positive, "After how many such cycles in a row the next one waits."] = 3
    within: Annotated[Duration, "A cycle that lasted longer ends the row."] = 60.0
    initial: Annotated[
        Duration,
        "The first pause, counted from the failure. Each one after it is twice as long.",
    ] = 1.0
    max: Annotated[Pause, "The longest pause; `0` turns the back-off off."] = 60.0

    @classmethod
    def long_form(cls, value: object) -> object:
        return {"max": 0} if value is False or str(value).lower() in ("0", "off", "false") else value


class ProgressSpec(Block, frozen=True, kw_only=True):
    """When a job that fails again and again counts as stuck, and ends with 93.

    `workload.beat(step=…)` reports the step of a cycle; where workers do not call it, a file or the logs do.
    Of several the furthest counts.
    """

    max_no_progress_cycles: Annotated[
        Positive | None,
        "After so many cycles in a row with too few steps the job ends. Not set: it never counts as stuck.",
    ] = None
    min_progress_steps: Annotated[Positive, "With fewer steps than this a cycle has made no progress."] = 1
    iteration_file: Annotated[
        Line | None,
        "A file that holds the last saved step, such as Megatron's `latest_checkpointed_iteration.txt`; "
        "relative to the folder of job.yaml.",
    ] = None
    log_pattern: Annotated[
        Annotated[Line, After(_one_group)] | None,
        "A regular expression with one group, the step, such as `iteration +([0-9]+)/`. Its last match in "
        "what a rank has printed counts.",
    ] = None


class FaultToleranceSpec(Block, frozen=True, kw_only=True):
    """Budgets and bounds."""

    max_restarts: Annotated[
        CountOrRate,
        "How many worker failures each replica is restarted after, in all or within some time. Lost nodes "
        "do not count: they cost spares.",
    ] = Allowance(count=3)
    max_job_restarts: Annotated[CountOrRate | None, "The same for all replicas together. Not set: no limit."] = None
    max_node_losses: Annotated[
        CountOrRate | None,
        "After how many lost nodes the job goes on. Not set: for as long as it has spares.",
    ] = None
    max_preemptions: Annotated[
        CountOrRate | None,
        "After how many preemptions and requeues the job goes on. Not set: no limit, since they are the site's "
        "decisions.",
    ] = None
    quarantine_after: Annotated[Positive, "A node that was lost this often gets no further ranks."] = 3
    control_plane_grace: Annotated[
        Duration,
        "How long workers go on without controller and store. Then they are stopped, and Slurm is asked to "
        "requeue. Not set: at least `fence_timeout`.",
    ] = 600.0
    fence_timeout: Annotated[
        Duration,
        "A node that has lost both store and controller kills its workers after this; only then do their "
        "ranks run elsewhere, unless its death is proven. Not set: at least `heartbeat.timeout`.",
    ] = 30.0
    heartbeat: HeartbeatSpec = HeartbeatSpec()
    rendezvous: RendezvousSpec = RendezvousSpec()
    teardown: TeardownSpec = TeardownSpec()
    hang: HangSpec = HangSpec()
    backoff: Annotated[BackoffSpec, _or({"type": ["string", "integer", "boolean"]}, "BackoffSpec")] = BackoffSpec()
    progress: ProgressSpec = ProgressSpec()
    attribution: AttributionSpec = AttributionSpec()

    def settled(self, said: Mapping[str, Any]) -> Self:
        silence_s, attribution = self.heartbeat.timeout, self.attribution
        fence_s = self.fence_timeout if "fence_timeout" in said else max(self.fence_timeout, silence_s)
        grace_s = self.control_plane_grace
        grace_s = grace_s if "control_plane_grace" in said else max(grace_s, fence_s)
        if fence_s < silence_s:
            raise _unfit("must be at least heartbeat.timeout", silence_s, fence_s, "fence_timeout")
        # A shorter grace does no harm, since workers are dead by then; but a user who sets both means more.
        if "fence_timeout" in said and fence_s > grace_s:
            raise _unfit("must be at most control_plane_grace", grace_s, fence_s, "fence_timeout")
        # Signs of progress travel with the heartbeats: a shorter bound would see none.
        interval_s = self.heartbeat.interval
        for key in ("startup_timeout", "step_timeout", "no_output", "exit_skew"):
            bound_s = getattr(self.hang, key)
            if bound_s is not None and bound_s <= interval_s:
                raise _unfit("must be longer than heartbeat.interval", interval_s, bound_s, "hang", key)
        # A rendezvous waits for sources while it waits for nodes, and for no source whose own timeout has passed.
        bounds = {"attribution.timeout": attribution.timeout, "rendezvous.join_timeout": self.rendezvous.join_timeout}
        key, most_s = min(bounds.items(), key=lambda bound: bound[1])
        decision_s = attribution.decision_timeout
        if decision_s > most_s:
            asked = said.get("attribution", {})
            if isinstance(asked, Block) or "decision_timeout" in asked:
                raise _unfit(f"must be at most {key}", most_s, decision_s, "attribution", "decision_timeout")
            attribution = replace(attribution, decision_timeout=most_s)
        return replace(self, fence_timeout=fence_s, control_plane_grace=grace_s, attribution=attribution)

    @property
    def gives_away_after_s(self) -> float:
        """How long after a node's last sign of life its ranks may run elsewhere although its death is not proven.

        By then its supervisor, if it lives, has killed its workers: they hold a lease of `fence_timeout`, renewed
        once an interval. The margin covers one interval on either side and the kill itself.
        """
        return self.fence_timeout + 2 * self.heartbeat.interval + FENCE_MARGIN_S


# ----------------------------------------------------------------------------------------------------------- the job


def _store_url(text: str) -> str:
    place = "put it into a file (mode 0600) named by store.password_file, or into NVRX_SLURM_STORE_PASSWORD"
    return check_redis_url(text, password_goes_to=place)


def _store_server(text: str) -> str:
    if text in ("auto", "bundled") or text.startswith("/"):
        return text
    raise ValueError("must be `auto`, `bundled`, or the absolute path of a valkey-server or redis-server")


class SlurmSpec(Block, frozen=True, kw_only=True):
    """What to ask Slurm for. A key that is not set is left to the cluster's default."""

    partition: Annotated[Line | None, "`--partition`"] = None
    account: Annotated[Line | None, "`--account`"] = None
    qos: Annotated[Line | None, "`--qos`"] = None
    time: Annotated[
        TimeLimit | None,
        "Time limit: a duration (`12h`), or as sbatch takes it (`2-00:00:00`, `UNLIMITED`; a number is minutes).",
    ] = None
    gpus_per_node: Annotated[Gpus | None, "`--gpus-per-node`: a number, or `type:number`"] = None
    cpus_per_task: Annotated[
        Positive | None,
        "CPUs for each node's agent and all of its workers together (one task runs on each node).",
    ] = None
    mem: Annotated[Line | None, "`--mem` per node, such as `64G`; `0` is all of it"] = None
    constraint: Annotated[Line | None, "`--constraint`"] = None
    exclude: Annotated[Line | None, "`--exclude`: nodes not to use"] = None
    reservation: Annotated[Line | None, "`--reservation`"] = None
    dependency: Annotated[Line | None, "`--dependency`, such as `afterok:1234`"] = None
    array: Annotated[
        Line | None,
        "`--array`, such as `0-7`: each task is a job of its own, with a folder and a journal; its id is `1234_7`, "
        "and its workers find SLURM_ARRAY_TASK_ID in their environment",
    ] = None
    segment: Annotated[Nodes | None, "`--segment`: nodes of one network block (Slurm 24.05 and newer)"] = None
    extra: Annotated[
        Extra,
        "Any other sbatch flag, without its dashes: `comment: text`; `true` for a flag without a value.",
    ] = field(default_factory=dict)

    def settled(self, said: Mapping[str, Any]) -> Self:
        for flag in self.extra:
            if (key := flag.replace("-", "_")) in self.__struct_fields__:
                raise Misfit(f"is a key of its own; set `slurm.{key}`", "extra", flag)
        return self


class StoreSpec(Block, frozen=True, kw_only=True):
    """Where the job keeps its state. Without `url`: an embedded Valkey on the batch host."""

    url: Annotated[
        Annotated[Line, After(_store_url)] | None,
        "`redis://host:port/db` or `rediss://…` of your own Redis or Valkey; without a password in it. "
        "After `rediss://…` may stand `?ssl_ca_certs=/file`, and `ssl_certfile` and `ssl_keyfile`; the "
        "server's certificate and the host name in it are always checked",
    ] = None
    server: Annotated[
        Annotated[Line, After(_store_server)],
        "The program of the embedded store, version 7.0 or newer. `bundled`: the one that is installed with "
        "this tool. `auto`: a `valkey-server` or `redis-server` on the batch host's PATH, where it has TLS "
        "and the job has several nodes, or where it is a newer Valkey; else the bundled one. Or the path of "
        "a program that only root or you may write",
    ] = "auto"
    password_file: Annotated[
        Line | None,
        "A file (mode 0600) with its password; or set NVRX_SLURM_STORE_PASSWORD",
    ] = None
    namespace: Annotated[
        Name | None,
        "With `url`: the job's keys begin with `nvrx:{<namespace>/`, for a store that others use too. An "
        "ACL user of the server can then be kept to them: `nvrx-slurm store acl` prints its rule, and "
        "`redis://user@host…` logs it in",
    ] = None

    @classmethod
    def long_form(cls, value: object) -> object:
        return {} if value == "embedded" else value

    def settled(self, said: Mapping[str, Any]) -> Self:
        if self.url is not None and self.server != "auto":
            raise Misfit(
                "starts a server of its own, and store.url names one that runs: set one of the two", "server"
            )
        if self.url is None and self.namespace is not None:
            raise Misfit("is for a store that several users share: set store.url, too", "namespace")
        return self


class LeaseSpec(Block, frozen=True, kw_only=True):
    """A file that the job's submitter touches. The job ends itself, with 143, once the last touch is `timeout` old.

    Workers start after the first touch, so a job without a live submitter runs nothing."""

    file: Annotated[
        NonEmpty,
        "The file, on a file system that the job's nodes share; relative to the folder of job.yaml. `touch` "
        "it, several times within the timeout.",
    ]
    timeout: Annotated[
        Duration,
        "How long the job goes on after the last touch, by the clock of its batch host.",
    ] = 30.0


class RetentionSpec(Block, frozen=True, kw_only=True):
    """Which folders of ended jobs `nvrx-slurm rm --expired` removes. It reads the site files and the environment, and
    no job.yaml. Nothing is removed by itself."""

    days: Annotated[Positive | None, "Those of jobs that ended longer ago than this."] = None
    keep: Annotated[Positive | None, "But never the newest so many; without `days`: all others."] = None


class RoleSpec(Block, frozen=True, kw_only=True):
    """One kind of worker in a job with several."""

    command: Annotated[
        Command,
        "What each worker runs: a list, or one string that is split as a shell would; no shell runs it.",
    ]
    replicas: Annotated[Nodes, "How many worlds of this role run side by side."] = 1
    nodes_per_replica: Annotated[Nodes, "Nodes in each of them."] = 1
    min_nodes: Annotated[Nodes | None, "With no spare left, a replica goes on with as few as this."] = None
    workers_per_node: Annotated[Workers, "Worker processes on each node."] = 1
    on_failure: Annotated[
        OnFailure,
        "What follows when a worker fails: its replica restarts; all replicas restart; the replica ends alone; "
        "the job ends.",
    ] = "restart_replica"
    workdir: Annotated[Line | None, "Where this role's workers start."] = None
    env: Annotated[Environment, "Environment of this role's workers, on top of the job's."] = field(
        default_factory=dict
    )
    container: Annotated[
        ContainerSpec | None,
        _or({"type": "string"}, "ContainerSpec"),
        "What this role's workers run in, instead of the job's `container`.",
    ] = None
    prewarm: Annotated[
        PrewarmSpec | None,
        _or(_SHORT_PREWARM, "PrewarmSpec"),
        "What this role's workers are forked from, instead of the job's `prewarm`; `off`: nothing.",
    ] = None

    def settled(self, said: Mapping[str, Any]) -> Self:
        _check_min_nodes(self.min_nodes, self.nodes_per_replica, "nodes_per_replica")
        return self


class JobSpec(Block, frozen=True, kw_only=True):
    """A job: what to run, on how many nodes, and what to do after a failure."""

    name: Annotated[Name, "The job's name, in Slurm too."]
    command: Annotated[
        Command | None,
        "What each worker runs: a list, or one string that is split as a shell would; no shell runs it.",
    ] = None
    nodes: Annotated[
        Nodes,
        "Nodes that run workers. Hot spares come on top. Not set: `run` inside an allocation uses all of its nodes "
        "but the spares.",
    ] = 1
    spares: Annotated[
        Annotated[Spares, _SPARES],
        "Hot spares: idle nodes of the allocation, ready to replace a lost one. All roles share them. `0..2`: up to "
        "two, as many as Slurm has free when the job starts.",
    ] = 0
    min_spares: Annotated[
        Spares | None,
        "Start with as few hot spares as this where Slurm has no more at that moment. `spares: 0..2` is short for "
        "`min_spares: 0` and `spares: 2`.",
    ] = None
    min_nodes: Annotated[
        Nodes | None,
        "With no spare left, go on with as few nodes as this. Without it the job ends with 75, worth a retry.",
    ] = None
    workers_per_node: Annotated[Workers, "Worker processes on each node, usually one a GPU."] = 1
    workdir: Annotated[
        Line | None,
        "Where workers start; relative to the folder of job.yaml. Without it: the folder you submit from.",
    ] = None
    output: Annotated[
        LogName | None,
        "A link that the job makes to the log of all its workers: `logs/%x-%j.out`, with sbatch's `%j` (the job's "
        "id), `%x` (its name), `%u` (you), and of an array `%A` and `%a`; relative to the folder of job.yaml. A file "
        "that exists stays.",
    ] = None
    env: Annotated[Environment, "Environment of all workers. No secrets: the job script shows it."] = field(
        default_factory=dict
    )
    container: Annotated[
        ContainerSpec | None,
        _or({"type": "string"}, "ContainerSpec"),
        "The container that workers run in: an image, or a mapping; see below.",
    ] = None
    prewarm: Annotated[
        PrewarmSpec | None,
        _or(_SHORT_PREWARM, "PrewarmSpec"),
        "Start workers from a process that has imported their modules: `auto`, a list of modules, or a mapping; see "
        "below. Not set: off.",
    ] = None
    setup: Annotated[
        Lines,
        "Shell lines of the job script before anything starts: `module load …`, `source venv/bin/activate`. A line "
        "that fails fails the job; `… || true` may fail.",
    ] = ()
    roles: Annotated[
        dict[Name, RoleSpec] | None,
        "Several kinds of workers, by name, instead of `command` and `nodes` (an RL job: policy and rollout).",
    ] = None
    slurm: SlurmSpec = SlurmSpec()
    fault_tolerance: FaultToleranceSpec = FaultToleranceSpec()
    store: Annotated[StoreSpec, _or({"const": "embedded"}, "StoreSpec")] = StoreSpec()
    lease: Annotated[LeaseSpec | None, "A file that the submitter touches to keep the job alive; see below."] = None
    retention: RetentionSpec = RetentionSpec()

    @classmethod
    def long_form(cls, value: object) -> object:
        """`spares: 0..2`, a range, is two keys."""
        spares = value.get("spares") if isinstance(value, Mapping) else None
        if isinstance(spares, str) and (bounds := _RANGE.fullmatch(spares.strip())):
            return {**value, "min_spares": int(bounds[1]), "spares": int(bounds[2])}  # type: ignore[dict-item]
        return value

    def __post_init__(self) -> None:
        # A Python caller gives what job.yaml may hold: `command="python train.py"`, `slurm={"time": "1h"}`. Values
        # that `read` has checked pass unchanged. Raises ValueError.
        # What equals its default counts as not said: `settled` objects only to what the caller has said.
        defaults = {name: key.default for name, key in keys_of(JobSpec).items()}
        given = {name: value for name in defaults if (value := getattr(self, name)) != defaults[name]}
        said = cast("dict[str, Any]", self.long_form(given))
        for name, value in checked(JobSpec, said).items():
            force_setattr(self, name, value)
        self.settled(said)

    def settled(self, said: Mapping[str, Any]) -> Self:
        if self.roles:
            if plain := {"command", "nodes", "min_nodes", "workers_per_node"} & set(said):
                key = min(plain)
                instead = "nodes_per_replica" if key == "nodes" else key
                raise Misfit(f"with `roles`, set `{instead}` in each role instead", key)
        elif self.command is None:
            raise ValueError("`command` is missing: say what each worker runs (or give `roles`)")
        _check_min_nodes(self.min_nodes, self.nodes, "nodes")
        for name, role in (self.roles or {}).items():
            inside = [each for each in (role.container, self.container) if each is not None and each.agents_inside]
            if role.container is not None and inside:
                what = "pyxis runs the agents" if inside[0].runtime == "pyxis" else "the agents run"
                where = ("roles", name, "container")
                raise Misfit(f"{what} inside too, and they serve every role: set the job's", *where)
        if self.min_spares is not None and self.min_spares > self.spares:
            text = f"at least {self.min_spares} (`min_spares`) and at most {self.spares}: the first is larger"
            raise Misfit(text, "spares" if "spares" in said else "min_spares")
        roles = (self.roles or {}).values()
        total = self.spares + (sum(role.replicas * role.nodes_per_replica for role in roles) or self.nodes)
        if total > MOST_NODES:
            raise Misfit(f"{total} nodes with the spares; at most {MOST_NODES} are possible", "spares")
        # What happens ahead of the time limit must fit there. The defaults always do: no limit is that short.
        teardown, limit_s = self.fault_tolerance.teardown, self.slurm.time
        needed_s = least_notice_s(teardown.grace, teardown.checkpoint_s)
        if limit_s is None or needed_s <= most_notice_s(limit_s):
            return self
        saving = f"teardown.checkpoint_timeout ({words(teardown.checkpoint_s)}), " if teardown.checkpoint_s else ""
        raise Misfit(
            f"{saving}teardown.grace ({words(teardown.grace)}) and {words(AFTER_GRACE_S)} for the kill take"
            f" {words(needed_s)} ahead of slurm.time ({words(limit_s)}); at most half of it"
            f" ({words(most_notice_s(limit_s))}) can be spent so: shorten them, or ask for more time",
            "fault_tolerance",
            "teardown",
            "checkpoint_timeout" if teardown.checkpoint_s > teardown.grace else "grace",
        )
