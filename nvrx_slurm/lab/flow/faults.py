"""The faults that a flow can ask for: what each takes, and where it can be done. How: `flow.stages`, by name.

A target may be written short: `kill_node: n3`, `kill_worker: 2`. Where a name or a rank belongs, a capture may stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from nvrx_slurm.jobspec.reading import After, Before, Block, Misfit, Schema
from nvrx_slurm.jobspec.values import SIGNALS, Duration, Line, Pause, Positive, Switch
from nvrx_slurm.lab.flow.model import STAGES, StageName

_SIGNALS = ("SIGKILL", "SIGSTOP", "SIGCONT", *SIGNALS)


# ------------------------------------------------------------------------------------------------- values


def _rank(value: object) -> object:
    if isinstance(value, str) and value.startswith("$"):
        return value
    if not isinstance(value, (str, int)) or isinstance(value, bool) or not str(value).isdecimal():
        raise ValueError(f"must be a rank, such as 2, or a capture such as $rank, not {value!r}")
    return int(value)


def _chosen(value: bool) -> bool:
    if not value:
        raise ValueError("must be true; leave it out to name another node")
    return value


def _signal(value: object) -> object:
    name = str(value).upper()
    name = name if name.startswith("SIG") else f"SIG{name}"
    if name not in _SIGNALS:
        raise ValueError(f"must be one of {', '.join(_SIGNALS)}, not {value!r}")
    return name


def _share(value: object) -> float:
    text = str(value).strip()
    try:
        share = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise ValueError(f"must be a share such as 10%, up to 100%, not {value!r}")
    return share


def _moment(value: object) -> object:
    return 0.0 if value == "now" else value


Rank = Annotated[int | str, Before(_rank), Schema({"type": ["integer", "string"]})]
Chosen = Annotated[Switch, After(_chosen), Schema({"const": True})]
Signal = Annotated[str, Before(_signal), Schema({"type": "string", "examples": ["USR1", "SIGKILL"]})]
Share = Annotated[float, Before(_share), Schema({"type": ["string", "number"], "examples": ["10%"]})]


# ---------------------------------------------------------------------------------------------- arguments


class Arguments(Block, frozen=True, kw_only=True):
    """What a fault takes. `short`: the key whose value a plain value is."""

    short: ClassVar[str | None] = None

    @classmethod
    def long_form(cls, value: Any) -> Any:
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        if cls.short is None:
            raise ValueError(f"takes no value such as {value!r}; leave it empty, or write a mapping of its arguments")
        return {cls.short: value}


class Nothing(Arguments, frozen=True, kw_only=True):
    """No arguments."""


class NodeTarget(Arguments, frozen=True, kw_only=True):
    """A node: one of `node`, `of_rank`, `spare`, `batch_host`."""

    short: ClassVar[str | None] = "node"

    node: Annotated[Line | None, "Its name, or a capture such as `$dead`."] = None
    of_rank: Annotated[Rank | None, "The node on which this rank runs."] = None
    spare: Annotated[Positive | None, "The hot spare with this number, from 1, in the allocation's order."] = None
    batch_host: Annotated[Chosen | None, "The node on which the batch script and the controller run."] = None
    replica: Annotated[
        Line | None, "With `of_rank`: whose rank, such as `policy-0`. Not needed with one replica."
    ] = None

    def settled(self, said: Mapping[str, Any]) -> Self:
        _check_target(self, "node", "of_rank", "spare", "batch_host", rank="of_rank")
        return self


class WorkerTarget(Arguments, frozen=True, kw_only=True):
    """A worker: `rank`, or `of_node`."""

    short: ClassVar[str | None] = "rank"

    rank: Annotated[Rank | None, "Its rank."] = None
    of_node: Annotated[Line | None, "The first rank on this node; a name, or a capture such as `$dead`."] = None
    replica: Annotated[
        Line | None, "With `rank`: of which replica, such as `policy-0`. Not needed with one replica."
    ] = None

    def settled(self, said: Mapping[str, Any]) -> Self:
        _check_target(self, "rank", "of_node", rank="rank")
        return self


class SlowLink(NodeTarget, frozen=True, kw_only=True):
    """A node, and what happens to its packets: `delay`, `loss`, or both."""

    delay: Annotated[Duration | None, "By how much each packet is late."] = None
    loss: Annotated[Share | None, "How many packets are lost, such as `10%`."] = None

    def settled(self, said: Mapping[str, Any]) -> Self:
        NodeTarget.settled(self, said)
        if self.delay is None and self.loss is None:
            raise ValueError("needs `delay` (such as 200ms), `loss` (such as 10%), or both")
        return self


class Cancel(Arguments, frozen=True, kw_only=True):
    """How the job is cancelled."""

    signal: Annotated[
        Signal | None, "`scancel --signal`; without it Slurm's own way: TERM, and KILL after KillWait."
    ] = None
    twice: Annotated[Switch, "Sends it twice in a row."] = False


class TimeLimit(Arguments, frozen=True, kw_only=True):
    """The new time limit."""

    short: ClassVar[str | None] = "to"

    to: Annotated[
        Annotated[Pause, Before(_moment), Schema({"type": "string", "examples": ["now", "1m"]})],
        "Counted from the job's start, as Slurm counts: `1m`; or `now`: it is over.",
    ]


class Preempt(Arguments, frozen=True, kw_only=True):
    """How the partition's jobs are preempted."""

    grace: Annotated[Pause, "The partition's GraceTime."] = 0.0
    mode: Annotated[Literal["REQUEUE", "CANCEL"], "Its PreemptMode."] = "REQUEUE"


class Suspend(Arguments, frozen=True, kw_only=True):
    """How long the job stands still."""

    short: ClassVar[str | None] = "lasts"

    lasts: Annotated[Pause, "From `scontrol suspend` to `scontrol resume`, or how long the other job runs: `30s`."]


def _check_target(block: NodeTarget | WorkerTarget, *keys: str, rank: str) -> None:
    """Exactly one of the keys is set, and `replica` only beside the one that names a rank."""
    said = [key for key in keys if getattr(block, key) is not None]
    if len(said) != 1:
        seen = " and ".join(f"`{key}`" for key in said) or "none"
        raise ValueError(f"takes exactly one of {', '.join(f'`{key}`' for key in keys)}, not {seen}")
    if block.replica is not None and said != [rank]:
        raise Misfit(f"says whose rank is meant, and belongs to `{rank}`", "replica")


# ------------------------------------------------------------------------------------------------ the table


Need = Literal["disk", "network", "attribution"]
# What a fault may need of `cluster`, and how that is asked for.
NEEDS: dict[Need, str] = {"disk": "disk: 4m", "network": "network: own", "attribution": "attribution: stop"}


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A fault that exists. `names`: what its `as:` can name; `needs`: the key of `cluster` that it depends on."""

    about: str
    arguments: type[Arguments] = Nothing
    stages: tuple[StageName, ...] = STAGES
    names: Literal["node", "rank"] | None = None
    needs: Need | None = None


_OWN_MACHINE: tuple[StageName, ...] = ("local", "dev")
_OWN_SLURM: tuple[StageName, ...] = ("dev",)
_ANY_SLURM: tuple[StageName, ...] = ("dev", "slurm")
_OWN_NETWORK: tuple[StageName, ...] = ("local",)


def _worker(about: str) -> FaultKind:
    return FaultKind(about, WorkerTarget, names="rank")


def _service(about: str) -> FaultKind:
    return FaultKind(about, stages=_OWN_MACHINE, needs="attribution")


def _node(about: str, stages: tuple[StageName, ...] = STAGES, needs: Literal["network"] | None = None) -> FaultKind:
    return FaultKind(about, NodeTarget, stages, names="node", needs=needs)


FAULTS: dict[str, FaultKind] = {
    "kill_worker": _worker("SIGKILL for one worker."),
    "stop_worker": _worker("SIGSTOP for one worker: it lives and does nothing."),
    "continue_worker": _worker("SIGCONT for one worker."),
    "kill_agent": _node("SIGKILL for a node's agent."),
    "stop_agent": _node("SIGSTOP for a node's agent."),
    "continue_agent": _node("SIGCONT for a node's agent."),
    "kill_supervisor": _node("SIGKILL for the process that watches over a node's workers."),
    "kill_controller": FaultKind("SIGKILL for the controller."),
    "stop_controller": FaultKind("SIGSTOP for the controller."),
    "continue_controller": FaultKind("SIGCONT for the controller."),
    "kill_store": FaultKind("SIGKILL for the embedded store."),
    "stop_store": FaultKind("SIGSTOP for the embedded store."),
    "continue_store": FaultKind("SIGCONT for the embedded store."),
    "kill_batch_host": FaultKind("SIGKILL for the process that the batch script becomes."),
    "kill_node": _node("Everything on a node dies at once. On a site's Slurm: everything of the job."),
    "stop_node": _node("Everything on a node freezes. On a site's Slurm: everything of the job."),
    "restore_node": _node("A frozen node goes on; a killed one boots again, on `dev`."),
    "drain_node": _node("`scontrol update state=drain`: the node gets no new job.", _OWN_SLURM),
    "down_node": _node("`scontrol update state=down`: Slurm gives the node up.", _OWN_SLURM),
    "resume_node": _node("`scontrol update state=resume`.", _OWN_SLURM),
    "cut_link": _node("A node's network is cut.", _OWN_NETWORK, "network"),
    "slow_link": FaultKind(
        "A node's network is slow, or loses packets.", SlowLink, _OWN_NETWORK, names="node", needs="network"
    ),
    "heal_link": _node("The network of a node works normally again.", _OWN_NETWORK, "network"),
    "fill_disk": FaultKind("The disk below the job folder is full.", stages=_OWN_MACHINE, needs="disk"),
    "free_disk": FaultKind("The disk below the job folder has free space again.", stages=_OWN_MACHINE, needs="disk"),
    "kill_attribution_service": _service("SIGKILL for the scripted attribution service."),
    "stop_attribution_service": _service("SIGSTOP for it: its connections stay open, and it does not answer."),
    "continue_attribution_service": _service("SIGCONT for it."),
    "revoke_store_password": FaultKind("The password of the store is changed."),
    "scancel": FaultKind("A user cancels the job.", Cancel),
    "preempt": FaultKind("A job of higher priority takes the nodes.", Preempt, _OWN_SLURM),
    "preempt_with_notice": FaultKind(
        "The same where Slurm sends the signal that the job asked for (`preempt_send_user_signal`).",
        Preempt,
        _OWN_SLURM,
    ),
    "preempt_by_suspending": FaultKind(
        "A job of higher priority takes the nodes for a while (PreemptMode=SUSPEND,GANG).", Suspend, _OWN_SLURM
    ),
    "suspend": FaultKind("`scontrol suspend`, and after a while `scontrol resume`.", Suspend, _OWN_SLURM),
    "requeue": FaultKind("`scontrol requeue`.", stages=_ANY_SLURM),
    "shorten_time_limit": FaultKind("The job's time limit comes nearer.", TimeLimit, _ANY_SLURM),
    "release": FaultKind("A requeued job that Slurm holds back for two minutes may start now.", stages=_OWN_SLURM),
}
