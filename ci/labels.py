"""The labelled failures of tests/corpus: how a case says what is true of it (tests/corpus/README.md)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.journal.verdicts import Failed, FailureKey, Inquiry, Scope, Verdict

CORPUS = Path(__file__).parents[1] / "tests" / "corpus"
NOTHING_WRONG = "unknown"
"""The fault of a log in which nothing failed, and of one that does not tell."""

Part = Literal["dev", "held_out", "fresh", "unseen"]
PARTS: tuple[Part, ...] = get_args(Part)


class Primary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The line that is the cause: a pattern of its file's name, and words of the line, or of each that tells it."""

    file: str
    text: tuple[str, ...]


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an agent would know of the failure beside the logs."""

    nodes: tuple[str, ...] = ()
    workers_per_node: int = 1
    pids: dict[int, int] = {}
    failed: Failed | None = None


class Label(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is true of a case. Where several answers would do, all are listed; what is left out is not judged."""

    verdict: tuple[Verdict, ...]
    fault: tuple[str, ...]
    scope: tuple[Scope, ...] = ()
    blamed_ranks: tuple[int, ...] | None = None
    blamed_nodes: tuple[str, ...] | None = None
    missing: tuple[int, ...] | None = None
    primary: Primary | None = None
    lookalike: bool = False
    inquiry: Facts = Facts()
    why: str


@dataclass(frozen=True, slots=True)
class Case:
    """A folder with `case.yaml`, `logs/` and, where a cycle came before, `earlier/`."""

    folder: Path
    label: Label

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def must_stop(self) -> bool:
        """Whether nothing but a STOP is right."""
        return self.label.verdict == (Verdict.STOP,)

    @property
    def multi_rank(self) -> bool:
        """Whether its logs are those of several ranks, each in a file of its own or all in one."""
        return len(self.label.inquiry.nodes) * self.label.inquiry.workers_per_node > 1 or self.ranks > 1

    @property
    def ranks(self) -> int:
        return len({path.name.split(".")[0] for path in (self.folder / "logs").rglob("rank-*")})

    def inquiry(self) -> Inquiry:
        """The question as an agent would put it."""
        facts, earlier = self.label.inquiry, self.folder / "earlier"
        rank = facts.failed.rank if facts.failed else None
        return Inquiry(
            key=FailureKey(
                job=str(self.folder), generation=0, replica="main-0", cycle=int(earlier.is_dir()), rank=rank
            ),
            paths=(str(self.folder / "logs"),),
            failed=facts.failed,
            nodes=facts.nodes,
            workers_per_node=facts.workers_per_node,
            pids=facts.pids,
            earlier=tuple(str(path) for path in sorted(earlier.glob("cycle-*"), reverse=True)),
        )


def folders(part: Part, corpus: Path = CORPUS) -> list[Path]:
    """The cases of a part, by name."""
    return sorted(path.parent for path in (corpus / part).glob("*/case.yaml"))


def read_case(folder: Path) -> Case:
    """Raises ConfigError for a label that is wrong."""
    return Case(folder, _label(folder / "case.yaml"))


def _label(path: Path) -> Label:
    try:
        return msgspec.convert(_listed(YAML(typ="safe").load(path)), Label)
    except (msgspec.ValidationError, YAMLError) as error:
        raise ConfigError(f"is no label of a case: {error}", file=str(path)) from None


def _listed(data: Any) -> Any:
    """The same, with one value as a list of one where there may be several."""
    several = ("verdict", "scope", "text")
    if not isinstance(data, dict):
        return data
    return {
        key: [value] if key in several and isinstance(value, str) else _listed(value) for key, value in data.items()
    }
