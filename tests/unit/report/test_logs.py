"""Choosing and reading the ranks' output."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.report.logs import MergedReader, Reader, Selection, choose, find
from tests.unit.report.recorder import ended, plain_plan, roles_plan, say, write


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    return write(tmp_path, ended())


def text_of(reader: Reader) -> str:
    return b"".join(chunk.data for chunk in reader.read()).decode()


def test_files_are_ordered_by_cycle_then_rank_then_stream(folder: JobFolder) -> None:
    """Cycle 2 comes before cycle 10, rank 2 before rank 10, stdout before stderr."""
    for cycle in (10, 2):
        for rank in (10, 2):
            for stream in ("err", "out"):
                say(folder, "x", cycle=cycle, rank=rank, stream=stream)
    found = [(file.cycle, file.rank, file.path.suffix) for file in find(folder, Selection())]
    expected = [(cycle, rank, stream) for cycle in (2, 10) for rank in (2, 10) for stream in (".out", ".err")]
    assert found == expected


def test_one_ranks_output_is_passed_on_as_it_is(folder: JobFolder) -> None:
    """Its bytes are passed on once, without a prefix, including torn lines."""
    say(folder, "half a li", rank=3)
    reader = Reader(folder, Selection(replica="main-0", rank=3))
    assert text_of(reader) == "half a li"
    say(folder, "ne\n", rank=3)
    assert text_of(reader) == "ne\n"
    assert text_of(reader) == ""


def test_several_ranks_come_in_whole_marked_lines(folder: JobFolder) -> None:
    """Lines of several ranks are never mixed within a line; a last line without its newline is printed at the end."""
    say(folder, "one\ntw", rank=0)
    say(folder, "eins\n", rank=1)
    reader = Reader(folder, Selection(cycle=0))
    assert text_of(reader) == "[main-0 0] one\n[main-0 1] eins\n"
    say(folder, "o\nthree", rank=0)
    assert text_of(reader) == "[main-0 0] two\n"
    assert [chunk.data for chunk in reader.rest()] == [b"[main-0 0] three\n"]


def test_a_new_cycles_file_is_read_after_the_old_ones_end(folder: JobFolder) -> None:
    """Lines that workers of the old cycle still write come before the first line of the new cycle."""
    say(folder, "a\n")
    reader = Reader(folder, Selection(replica="main-0", rank=0))
    assert text_of(reader) == "a\n"
    say(folder, "last words\n")
    say(folder, "b\n", cycle=1)
    reader.look()
    assert [(chunk.file.cycle, chunk.data) for chunk in reader.read()] == [(0, b"last words\n"), (1, b"b\n")]


def test_a_file_that_vanishes_is_passed_over(folder: JobFolder) -> None:
    """Another process may remove the file after it was found; the other ranks' output is still read."""
    for rank in (0, 1):
        say(folder, "one\ntwo\n", rank=rank)
    reader, first = Reader(folder, Selection()), find(folder, Selection(rank=0))[0]
    first.path.unlink()
    reader.skip_to_last(3)
    assert text_of(reader) == "[main-0 1] one\n[main-0 1] two\n"
    reader.look()
    assert text_of(reader) == ""


def test_streams_can_be_chosen(folder: JobFolder) -> None:
    """Only the chosen stream is read."""
    say(folder, "out\n")
    say(folder, "err\n", stream="err")
    assert text_of(Reader(folder, Selection(rank=0, streams=("err",)))) == "err\n"


def test_the_merged_log_is_read_on(folder: JobFolder) -> None:
    """job.log is passed on unchanged from its start, also if it is created later."""
    reader = MergedReader(folder)
    assert text_of(reader) == ""
    folder.job_log.write_text("[main-0 0] hello\n")
    reader.look()
    assert text_of(reader) == "[main-0 0] hello\n"


def test_an_unknown_rank_is_an_error_that_names_the_valid_ones(folder: JobFolder) -> None:
    """The valid ranks come from the plan: a rank that has printed nothing yet is valid too."""
    with pytest.raises(UsageError, match="no rank 8: main-0 has ranks 0-7"):
        choose(Selection(rank=8), plain_plan(), folder, may_come=True)
    assert choose(Selection(rank=7), plain_plan(), folder, may_come=True).replica == "main-0"


def test_without_a_plan_the_files_show_the_valid_ranks(folder: JobFolder) -> None:
    """A folder without its plan can still be read."""
    say(folder, "x", rank=2)
    with pytest.raises(UsageError, match="no rank 5: main-0 has ranks 0-2"):
        choose(Selection(rank=5), None, folder, may_come=False)


def test_a_rank_of_several_replicas_needs_a_replica(folder: JobFolder) -> None:
    """If several replicas have the rank, the error names them; with a replica the choice is clear."""
    with pytest.raises(UsageError, match="rank 1 is in policy-0, rollout-0, rollout-1, rollout-2: choose one"):
        choose(Selection(rank=1), roles_plan(), folder, may_come=True)
    chosen = choose(Selection(rank=1, replica="rollout-2"), roles_plan(), folder, may_come=True)
    assert chosen.replica == "rollout-2"


def test_an_unknown_replica_is_an_error_that_names_the_valid_ones(folder: JobFolder) -> None:
    """The error for a mistyped --replica lists the job's replicas."""
    with pytest.raises(UsageError, match="no replica 'policy': the job has policy-0, rollout-0"):
        choose(Selection(replica="policy"), roles_plan(), folder, may_come=True)


def test_a_cycle_without_output_is_an_error_unless_it_is_waited_for(folder: JobFolder) -> None:
    """Reading a cycle without output is an error that names the cycles that have some; following waits for it."""
    say(folder, "x", cycle=1)
    with pytest.raises(UsageError, match="no output of cycle 5: there is output of cycle 1"):
        choose(Selection(cycle=5), plain_plan(), folder, may_come=False)
    choose(Selection(cycle=5), plain_plan(), folder, may_come=True)
