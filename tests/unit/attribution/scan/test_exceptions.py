"""The line below a traceback's frames names the exception, whichever name it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.attribution.rules.catalogue import load_catalogue
from nvrx_slurm.attribution.scan import Hit, LogFile, scan

CATALOGUE = load_catalogue()
HEAD = """\
Traceback (most recent call last):
  File "/work/train.py", line 31, in <module>
    main()
  File "/work/train.py", line 12, in main
    schedule.check()
"""


def exceptions(tmp_path: Path, text: str) -> list[Hit]:
    path = tmp_path / "a.log"
    path.write_text(text)
    read = scan([LogFile(path, None, None, "mixed")], CATALOGUE)
    return [hit for hit in read.hits if hit.rule.name == "exception.traceback"]


@pytest.mark.parametrize(
    "last",
    [
        "acme.plans.ScheduleInvalid: the warm-up is longer than the run",
        "io.UnsupportedOperation: not writable",
        "StopIteration",
        "_queue.Empty",
        "SystemExit: 2",
        "click.exceptions.BadParameter: 'x' is no number",
        "struct.error: unpack requires a buffer of 8 bytes",
        "__main__.run.<locals>.Unplanned: stage 4",
        "acme.Bad: first line\n  and a second one\nand a third",
        "acme.Bad: a\nnote: asked for by stage 3",
    ],
)
def test_any_name(tmp_path: Path, last: str) -> None:
    """A dotted name, a name without a message, a message of several lines, and notes are recognised."""
    hits = exceptions(tmp_path, f"loading\n{HEAD}{last}\n")
    assert [(hit.line, hit.text) for hit in hits] == [(7, last.splitlines()[0])]
    assert hits[0].groups["frames"] == "train.py:31 in <module>|train.py:12 in main"


@pytest.mark.parametrize(
    "last",
    ["SystemExit: 0", "click.exceptions.Exit: 0", "INFO: done", "Killed", "step 12 loss 2.3\nloading the next shard"],
)
def test_what_ends_no_traceback(tmp_path: Path, last: str) -> None:
    """A successful exit, or a log line or a shell's message where a traceback was cut, is no exception."""
    assert exceptions(tmp_path, f"{HEAD}{last}\n") == []


def test_lines_of_other_writers_between(tmp_path: Path) -> None:
    """Lines of other writers within a traceback are skipped, labelled or not."""
    frames = HEAD.splitlines()
    lines = ["[rank3]: " + line for line in (*frames, "acme.Bad: x")]
    lines.insert(3, "[rank1]: acme.NotThis: y")
    lines.insert(5, "[rank2]: step 4")
    assert [hit.text for hit in exceptions(tmp_path, "\n".join(lines))] == ["[rank3]: acme.Bad: x"]
    bare = "\n".join([*frames[:3], "step 4 of 10", *frames[3:], "step 5 of 10", "acme.Bad: x"])
    assert [hit.text for hit in exceptions(tmp_path, bare)] == ["acme.Bad: x"]


@pytest.mark.parametrize("prefix", ["(Trainer pid=812, ip=10.0.0.3) ", "2026-11-21T18:00:00.123456789Z stderr F "])
def test_labels_of_ray_and_kubernetes(tmp_path: Path, prefix: str) -> None:
    """Each line of the traceback has the label."""
    text = "".join(f"{prefix}{line}\n" for line in (*HEAD.splitlines(), "acme.Bad: x"))
    assert [hit.text for hit in exceptions(tmp_path, text)] == [f"{prefix}acme.Bad: x"]


def test_an_exception_group(tmp_path: Path) -> None:
    """The group is found, and each exception in it."""
    inner = "".join(f"    | {line}\n" for line in (*HEAD.splitlines(), "acme.Bad: x"))
    outer = "".join(f"  | {line}\n" for line in (*HEAD.splitlines()[1:], "ExceptionGroup: two (1 sub-exception)"))
    text = f"  + Exception Group {HEAD.splitlines()[0]}\n{outer}  +-+---------------- 1 ----------------\n{inner}"
    found = [hit.text.strip(" |") for hit in exceptions(tmp_path, text)]
    assert found == ["ExceptionGroup: two (1 sub-exception)", "acme.Bad: x"]


def test_a_traceback_that_two_reads_share(tmp_path: Path) -> None:
    """A traceback is found whose header is in one block of the file and its exception in the next."""
    for before in range((256 << 10) - 300, 256 << 10, 37):
        hits = exceptions(tmp_path, "x" * 99 + "\n" + "y" * (before - 101) + "\n" + HEAD + "acme.Bad: x\n")
        assert [hit.text for hit in hits] == ["acme.Bad: x"]


def test_many_tracebacks(tmp_path: Path) -> None:
    """The first and the last of many tracebacks are kept."""
    hits = exceptions(tmp_path, "".join(f"{HEAD}acme.Bad: {number}\n" for number in range(9000)))
    kept = [int(hit.text.rpartition(" ")[2]) for hit in hits]
    assert kept == [*range(8), *range(8992, 9000)]
