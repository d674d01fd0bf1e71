"""The labelled failures of tests/corpus: one JSON Lines file a part (tests/corpus/README.md says how it is written).

A line of such a file is one of these:

    {"case": "ecc-one-gpu", "verdict": ["RESTART"], …}   a case begins: its name and its label
    {"file": "logs/rank-0.err"}                          one of its files begins
    "Traceback (most recent call last):\\n"               the file's next line, its line end included
    {"latin-1": "caf\\u00e9\\n"}                           the same, for a line that is not UTF-8: a character a byte
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import msgspec
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.journal.verdicts import Failed, FailureKey, Inquiry, Scope, Verdict

CORPUS = Path(__file__).parents[1] / "tests" / "corpus"
NOTHING_WRONG = "unknown"
"""The fault of a log in which nothing failed, and of one that does not show what did."""
LABEL, LOGS, EARLIER = "case.yaml", "logs", "earlier"

Part = Literal["dev", "held_out", "fresh", "unseen", "shapes", "blind", "recorded"]
PARTS: tuple[Part, ...] = get_args(Part)


class Primary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The line that is the cause: a pattern of its file's name, and words of the line (one of several)."""

    file: str
    text: tuple[str, ...]


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an agent would know of the failure beside the logs."""

    nodes: tuple[str, ...] = ()
    workers_per_node: int = 1
    pids: dict[int, int] = {}
    failed: Failed | None = None


class Label(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
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
    """One failure. `files`: the bytes of each file, by its path below the case: `logs/…`, `earlier/cycle-<k>/…`."""

    part: str
    title: str
    label: Label
    files: Mapping[str, bytes]

    @property
    def name(self) -> str:
        return f"{self.part}/{self.title}"

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
        names = (PurePosixPath(path).name for path in self.logs)
        return len({name.split(".")[0] for name in names if name.startswith("rank-")})

    @property
    def logs(self) -> dict[str, bytes]:
        """The files of the cycle that failed, without those of earlier cycles."""
        return {path: data for path, data in self.files.items() if path.startswith(f"{LOGS}/")}

    def label_yaml(self) -> str:
        """The label as a contributor writes it."""
        text = io.StringIO()
        yaml = YAML(typ="safe", pure=True)
        yaml.default_flow_style, yaml.sort_base_mapping_type_on_output, yaml.width = None, False, 110  # type: ignore[assignment]
        yaml.dump(msgspec.to_builtins(self.label), text)
        return text.getvalue()

    def extract(self, folder: Path) -> None:
        """Write the case as a folder, as `read_folder` takes it. Its files are overwritten. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LABEL).write_text(self.label_yaml(), encoding="utf-8")
        self.extract_logs(folder)

    def extract_logs(self, folder: Path) -> None:
        """Write the case without its label, for an analysis: the YAML takes longer than all of the logs."""
        for path, data in self.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)

    def inquiry(self, folder: Path) -> Inquiry:
        """The question as an agent would put it, for a case that was extracted to `folder`."""
        facts, earlier = self.label.inquiry, folder / EARLIER
        rank = facts.failed.rank if facts.failed else None
        return Inquiry(
            key=FailureKey(job=self.name, generation=0, replica="main-0", cycle=int(earlier.is_dir()), rank=rank),
            paths=(str(folder / LOGS),),
            failed=facts.failed,
            nodes=facts.nodes,
            workers_per_node=facts.workers_per_node,
            pids=facts.pids,
            earlier=tuple(str(path) for path in sorted(earlier.glob("cycle-*"), reverse=True)),
        )


# --------------------------------------------------------------------------------- a part: one JSON Lines file


def part_file(part: str, corpus: Path = CORPUS) -> Path:
    return corpus / f"{part}.jsonl"


def read_part(part: str, corpus: Path = CORPUS) -> list[Case]:
    """The cases of a part, in the file's order. Raises ConfigError, with file and line, for what it does not know."""
    path = part_file(part, corpus)
    read: list[tuple[str, Label, dict[str, list[bytes]]]] = []
    lines: list[bytes] | None = None  # of the file that the next strings belong to
    for number, line in enumerate(path.read_bytes().splitlines(), 1):  # of bytes: at \n, \r, \r\n only
        try:
            match msgspec.json.decode(line):
                case str(text) if lines is not None:
                    lines.append(text.encode())
                case {"latin-1": str(text), **rest} if lines is not None and not rest:
                    lines.append(text.encode("latin-1"))
                case {"file": str(name), **rest} if read and not rest and _is_inside(name):
                    lines = read[-1][2][name] = []
                case {"case": str(title), **label}:
                    read.append((title, msgspec.convert(label, Label, str_keys=True), {}))
                    lines = None
                case _:
                    raise ConfigError("is no line of a part of the corpus", file=str(path), line=number)
        except (msgspec.MsgspecError, UnicodeEncodeError) as error:
            raise ConfigError(f"is no line of a part of the corpus: {error}", file=str(path), line=number) from None
    return [
        Case(part, title, label, {name: b"".join(lines) for name, lines in files.items()})
        for title, label, files in read
    ]


def write_part(part: str, cases: Iterable[Case], corpus: Path = CORPUS) -> None:
    """Write the file of a part, its cases by name: the same cases give the same bytes. Raises OSError."""
    part_file(part, corpus).write_bytes(pack(cases))


def pack(cases: Iterable[Case]) -> bytes:
    """The cases as JSON Lines. A log's line is a line of its own here, so that a diff and a search show that line."""
    lines = (line for case in sorted(cases, key=lambda case: case.title) for line in _case_lines(case))
    return "".join(f"{line}\n" for line in lines).encode()


def _case_lines(case: Case) -> Iterator[str]:
    label: dict[str, Any] = msgspec.to_builtins(case.label, str_keys=True)
    yield json.dumps({"case": case.title, **label}, ensure_ascii=False)
    for name, data in sorted(case.files.items()):
        yield json.dumps({"file": name}, ensure_ascii=False)
        for line in io.BytesIO(data):  # splits at \n alone: a \r stays within its line
            try:
                yield json.dumps(line.decode(), ensure_ascii=False)
            except UnicodeDecodeError:
                # Latin-1 has a character for each byte; escaped, since some of them are control characters.
                yield json.dumps({"latin-1": line.decode("latin-1")})


def _is_inside(name: str) -> bool:
    """Whether a file's path stays in the folder of its case."""
    parts = PurePosixPath(name).parts
    return len(parts) > 1 and parts[0] in (LOGS, EARLIER) and ".." not in parts


# ------------------------------------------------------------------------------------ a case as a folder


def read_folder(part: str, folder: Path) -> Case:
    """A case from its folder: `case.yaml`, `logs/` and, where a cycle came before, `earlier/cycle-<k>/`. The folder's
    name is the case's. Raises ConfigError for a label that is wrong, and for anything else in the folder."""
    files: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise ConfigError("is neither a file nor a folder", file=str(path))
        if path.is_file() and name != LABEL:
            if not _is_inside(name):
                raise ConfigError(f"is no file of a case: its logs are in {LOGS}/ and {EARLIER}/", file=str(path))
            files[name] = path.read_bytes()
    case = Case(part, folder.resolve().name, _label(folder / LABEL), files)
    if not case.logs:
        raise ConfigError(f"has no file in {LOGS}/", file=str(folder))
    return case


def _label(path: Path) -> Label:
    try:
        return msgspec.convert(_listed(YAML(typ="safe").load(path)), Label)
    except (msgspec.ValidationError, YAMLError, OSError) as error:
        raise ConfigError(f"is no label of a case: {error}", file=str(path)) from None


def _listed(data: Any) -> Any:
    """The same, with one value as a list of one where there may be several."""
    several = ("verdict", "scope", "text")
    if not isinstance(data, dict):
        return data
    return {
        key: [value] if key in several and isinstance(value, str) else _listed(value) for key, value in data.items()
    }
