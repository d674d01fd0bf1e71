"""The labelled failures of tests/corpus: they are well-formed and many, and the targets hold for those that no rule
was written by."""

import asyncio
import gzip
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import chain
from pathlib import PurePosixPath

import pytest

from ci.cases import NOTHING_WRONG, PARTS, Case, Label, Primary, part_file, read_part
from ci.corpus import (
    KNOWN,
    LEAST_PRECISION,
    LEAST_RECALL,
    TARGETS,
    Judged,
    Measured,
    judge,
    measured,
    missed,
    misses,
    precision,
    recall,
)
from nvrx_slurm.attribution.rules.catalogue import load_catalogue
from nvrx_slurm.journal.verdicts import Attribution, Evidence, Scope, Verdict

HANG = "hang"
"""What the analysis says of itself, where no rule's line is found."""

CASES = {part: read_part(part) for part in PARTS}
ALL = list(chain.from_iterable(CASES.values()))
MOST_BYTES = 6 << 20
TOLD_BY = "see `python -m ci.corpus --part held_out --failures`, but write no rule by what it shows"

each_case = pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> list[Judged]:
    return asyncio.run(judge(CASES["held_out"], tmp_path_factory.mktemp("corpus")))


@pytest.fixture(scope="module")
def faults() -> set[str]:
    return {rule.fault for rule in load_catalogue().rules} | {NOTHING_WRONG, HANG}


def logs(case: Case) -> Iterator[tuple[str, bytes]]:
    for path, data in case.logs.items():
        yield PurePosixPath(path).name, gzip.decompress(data) if path.endswith(".gz") else data


def test_precision_of_stop_on_cases_that_no_rule_was_written_by(held_out: list[Judged]) -> None:
    """Of 100 verdicts STOP at most two are false: a false one costs a night."""
    assert precision(held_out).share >= LEAST_PRECISION, TOLD_BY


def test_recall_of_stop_on_cases_that_no_rule_was_written_by(held_out: list[Judged]) -> None:
    """Nine of ten failures that a restart cannot help are recognised as such."""
    assert recall(held_out).share >= LEAST_RECALL, TOLD_BY


def test_there_are_many_cases() -> None:
    """There are enough cases, look-alikes and logs of several ranks, and they are small enough to keep in the
    repository."""
    assert len(ALL) >= 540
    assert sum(case.label.lookalike for case in ALL) >= 64
    assert sum(case.multi_rank for case in ALL) >= 110
    assert sum(part_file(part).stat().st_size for part in PARTS) <= MOST_BYTES


def test_the_known_parts_reach_the_targets(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Precision, recall, class and first line of the cases that rules were written by."""
    cases = list(chain.from_iterable(CASES[part] for part in KNOWN))
    assert not missed(measured(asyncio.run(judge(cases, tmp_path_factory.mktemp("known")))))


def test_real_failures_of_a_gpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Verdict, class, origin, blame and first line of each are right, although most kernel logs have an Xid of
    another job."""
    judged = asyncio.run(judge(CASES["recorded"], tmp_path_factory.mktemp("recorded")))
    assert not list(misses(judged)), "see `python -m ci.corpus --part recorded --failures`"


def test_intervals() -> None:
    """The intervals are those of Wilson's paper and of published tables."""
    assert [round(bound, 3) for bound in Measured(8, 10).interval] == [0.49, 0.943]
    assert [round(bound, 3) for bound in Measured(56, 57).interval] == [0.907, 0.997]
    assert Measured(0, 0).interval == (0.0, 1.0)
    low = {name: Measured(9, 10) for name in TARGETS}
    assert len(missed(low)) == len(TARGETS)


def test_the_unseen_part_is_of_every_kind() -> None:
    """Failures that must end the job, those that must not, look-alikes, and logs of several ranks."""
    cases = CASES["unseen"]
    failures = [case for case in cases if not case.label.lookalike]
    assert sum(case.must_stop for case in failures) >= 28
    assert sum(Verdict.STOP not in case.label.verdict for case in failures) >= 18
    assert len(cases) - len(failures) >= 10
    assert sum(case.multi_rank for case in cases) >= 20


def test_the_fresh_part_is_of_every_kind() -> None:
    """Failures that must end the job, those that must not, look-alikes, and logs of several ranks."""
    cases = CASES["fresh"]
    failures = [case for case in cases if not case.label.lookalike]
    assert sum(case.must_stop for case in failures) >= 36
    assert sum(Verdict.STOP not in case.label.verdict for case in failures) >= 30
    assert len(cases) - len(failures) >= 14
    assert sum(case.multi_rank for case in cases) >= 25


@each_case
def test_the_line_of_the_cause_stands_in_the_logs(case: Case) -> None:
    """The words of a label are in the logs, in the file that it names."""
    files = dict(logs(case))
    assert files
    if case.label.primary is not None:
        held = b"".join(data for name, data in files.items() if fnmatch(name, case.label.primary.file))
        for text in case.label.primary.text:
            assert any(text.encode(coding) in held for coding in ("utf-8", "latin-1", "utf-16-le")), text


@each_case
def test_a_label_agrees_with_itself(case: Case, faults: set[str]) -> None:
    """Its faults are classes of the catalogue, its ranks are of the job, and its reason is one sentence."""
    label = case.label
    assert set(label.fault) <= faults
    assert Verdict.TIMEOUT not in label.verdict
    assert label.why.endswith(".")
    ranks, nodes = {*(label.blamed_ranks or ()), *(label.missing or ())}, label.inquiry.nodes
    assert not nodes or ranks <= set(range(len(nodes) * label.inquiry.workers_per_node))


@pytest.fixture
def stop_case() -> Case:
    label = Label(
        verdict=(Verdict.STOP,),
        fault=("key_error",),
        scope=(Scope.USER_CODE,),
        blamed_ranks=(3,),
        blamed_nodes=(),
        primary=Primary("rank-*.err", ("KeyError: 'a'",)),
        why="So.",
    )
    return Case("dev", "case", label, {})


def test_an_answer_that_is_right_in_all(stop_case: Case) -> None:
    """Verdict, fault, scope, blame and line count each on their own."""
    line = Evidence(file="/logs/rank-3.err", line=7, text="[rank3]: KeyError: 'a'")
    answer = Attribution(
        source="lib", verdict=Verdict.STOP, fault="key_error", scope=Scope.USER_CODE, ranks=(3,), primary=line
    )
    judged = Judged(stop_case, answer)
    assert (judged.verdict, judged.fault, judged.scope, judged.blame, judged.primary) == (True,) * 5
    assert (precision([judged]), recall([judged])) == (Measured(1, 1), Measured(1, 1))
    assert not list(misses([judged]))


def test_an_answer_that_is_wrong_in_all(stop_case: Case) -> None:
    """A miss is listed with the answer given instead; without a verdict STOP, precision has no value."""
    answer = Attribution(source="lib", verdict=Verdict.RESTART, fault="gpu_ecc", scope=Scope.NODE, nodes=("n1",))
    judged = Judged(stop_case, answer)
    assert (judged.verdict, judged.fault, judged.scope, judged.blame, judged.primary) == (False,) * 5
    assert (precision([judged]), recall([judged])) == (Measured(0, 0), Measured(0, 1))
    assert "verdict, fault, scope, blame, line" in "\n".join(misses([judged]))
