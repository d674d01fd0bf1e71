"""The findings of agents in their nodes' logs give the same answer as the logs."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import msgspec
import pytest

from ci.cases import PARTS, Case, read_part
from nvrx_slurm.attribution.analyze.aftermath import Nature, TailLine, aftermath, condensed, nature
from nvrx_slurm.attribution.analyze.analysis import analyze_logs
from nvrx_slurm.attribution.analyze.attributing import SideEvidence
from nvrx_slurm.attribution.analyze.evidence import read_logs
from nvrx_slurm.attribution.analyze.node_findings import (
    SAMPLES,
    KnownRules,
    NodeFindings,
    decoded,
    encoded,
    found_in,
    joined,
    restored,
)
from nvrx_slurm.attribution.rules.catalogue import Catalogue, load_catalogue
from nvrx_slurm.attribution.scan import LogFile, Scan, find_logs
from nvrx_slurm.errors import MalformedRecord
from nvrx_slurm.journal.verdicts import MOST_FINDINGS_BYTES, FailureKey, Inquiry

CATALOGUE = load_catalogue()
RULES = KnownRules.of(CATALOGUE)
CASES = list(chain.from_iterable(read_part(part) for part in PARTS))
KEY = FailureKey(job="", generation=0, replica="main-0", cycle=0)


def found(node: str, folder: Path, logs: Sequence[LogFile]) -> NodeFindings:
    """The findings of a node's agent."""
    return found_in(node, folder, *read_logs(logs, CATALOGUE, threading.Event()), CATALOGUE)


def by_findings(inquiry: Inquiry, logs: Sequence[LogFile]) -> tuple[Scan, SideEvidence]:
    """Read each node's logs separately and encode the findings as an agent sends them; the broker reads the dumps."""
    folder, groups = Path(inquiry.paths[0]), dict[str | None, list[LogFile]]()
    dumps = [log for log in logs if log.kind == "flight_recorder"]
    for log in logs:
        if log not in dumps:
            groups.setdefault(log.node, []).append(log)
    parts = [read_logs(dumps, CATALOGUE, threading.Event())]
    for node, of_node in groups.items():
        data = encoded(found(node or "no-node", folder, of_node))
        assert data is not None
        parts.append(restored(decoded(data), node, folder, inquiry, RULES))
    return joined(parts)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_findings_say_what_the_logs_say(case: Case, tmp_path: Path) -> None:
    """For every labelled failure and the cycles before it, findings and logs give the same attribution in every
    field."""
    case.extract_logs(tmp_path)
    inquiry = case.inquiry(tmp_path)
    read = analyze_logs(inquiry, CATALOGUE).attribution
    assert analyze_logs(inquiry, CATALOGUE, read=by_findings).attribution == read


def test_each_sample_is_of_its_kind() -> None:
    """A sample stands for lines whose text is not sent."""
    assert {kind: nature(text) for kind, text in SAMPLES.items()} == {kind: kind for kind in Nature}


@pytest.mark.parametrize("seed", range(20))
def test_a_condensed_tail_has_the_same_aftermath(seed: int) -> None:
    """Each hit has the same aftermath in the condensed tail, for every rank, in a file of several ranks."""
    chance = random.Random(seed)
    texts = list(SAMPLES.values())
    tail = [TailLine(10 * number, chance.choice(texts), chance.choice((None, 0, 1))) for number in range(60)]
    hits = [10 * chance.randrange(60) for _ in range(5)] + [chance.randrange(600)]
    short = condensed(tail, hits)
    assert sum(line.times for line in short) == len(tail)
    for offset in hits:
        for rank in (None, 0, 1, 2):
            assert aftermath(offset, rank, short) == aftermath(offset, rank, tail)


@pytest.fixture
def inquiry(tmp_path: Path) -> Inquiry:
    """Two nodes of one rank each; rank 0 has failed."""
    (tmp_path / "rank-0.err").write_text("step 1\nKeyError: 'lr'\n")
    (tmp_path / "rank-1.err").write_text("step 1\n")
    return Inquiry(key=KEY, paths=(str(tmp_path),), nodes=("n1", "n2"))


def logs_on(node: str, inquiry: Inquiry) -> list[LogFile]:
    return [log for log in find_logs([Path(inquiry.paths[0])], inquiry) if log.node == node]


@pytest.mark.parametrize("name", ["rank-0.err", "health/n1.txt", "../rank-1.err", "/etc/passwd", "rank-9.err"])
def test_findings_about_files_of_another_node_are_refused(name: str, inquiry: Inquiry) -> None:
    """Findings of n2 about n1's logs, or about files elsewhere, are refused."""
    folder = Path(inquiry.paths[0])
    of_n2 = found("n2", folder, logs_on("n2", inquiry))
    assert [each.name for each in of_n2.files] == ["rank-1.err"]
    other = msgspec.structs.replace(of_n2, files=(msgspec.structs.replace(of_n2.files[0], name=name),))
    with pytest.raises(MalformedRecord):
        restored(decoded(msgspec.msgpack.encode(other)), "n2", folder, inquiry, RULES)


def test_findings_by_other_rules_are_refused(inquiry: Inquiry) -> None:
    """Either the site's rule file was changed, or agent and broker are of different versions."""
    folder = Path(inquiry.paths[0])
    of_n1 = found("n1", folder, logs_on("n1", inquiry))
    with pytest.raises(MalformedRecord):
        restored(of_n1, "n1", folder, inquiry, KnownRules.of(Catalogue(CATALOGUE.rules[1:])))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"x" * (MOST_FINDINGS_BYTES + 1), b"\x91" * 5000])
def test_what_is_no_findings_is_refused(data: bytes) -> None:
    """Empty, malformed, too long and deeply nested data is refused."""
    with pytest.raises(MalformedRecord):
        decoded(data)


def test_findings_have_a_bound(tmp_path: Path) -> None:
    """If logs are full of failures, the first and the last line of each rule in each file are kept."""
    samples = [sample for rule in CATALOGUE.rules if not rule.below for sample in rule.sample[:1]]
    lines = [f"{sample} {'x' * 300}\n" for _ in range(6) for sample in samples[:80]]
    for rank in range(4):
        (tmp_path / f"rank-{rank}.err").write_text("".join(lines))
    inquiry = Inquiry(key=KEY, paths=(str(tmp_path),), nodes=("n1",), workers_per_node=4)
    all_found = found("n1", tmp_path, logs_on("n1", inquiry))
    data = encoded(all_found)
    assert data is not None
    assert len(msgspec.msgpack.encode(all_found)) > MOST_FINDINGS_BYTES >= len(data)
    for whole, kept in zip(all_found.files, decoded(data).files, strict=True):
        assert {line.rule for line in kept.lines} == {line.rule for line in whole.lines}
        assert kept.lines[0] == whole.lines[0]
        assert kept.lines[-1] == whole.lines[-1]
