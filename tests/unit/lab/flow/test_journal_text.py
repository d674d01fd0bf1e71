"""A journal that somebody sends: read in full, or told what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec.plan import plan_to_json
from nvrx_slurm.journal.records import Entry, entry_to_json
from nvrx_slurm.lab.flow.replaying import read_journal, read_plan
from tests.unit.core.fleet import plain, running

JOURNAL = running().journal


def write(path: Path, entries: Sequence[Entry], end: bytes = b"") -> Path:
    path.write_bytes(b"".join(entry_to_json(entry) + b"\n" for entry in entries) + end)
    return path


def problem(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_journal(path)
    return str(caught.value)


def test_all_parts(tmp_path):
    """The folder, or its file: the older parts beside it are read with it."""
    for number in range(1, 4):
        write(tmp_path / f"events.{number}.jsonl", JOURNAL[number - 1 : number])
    file = write(tmp_path / "events.jsonl", JOURNAL[3:])
    assert list(read_journal(tmp_path).entries) == list(read_journal(file).entries) == JOURNAL


def test_torn_last_line(tmp_path):
    """What a writer did not finish is left out, and said."""
    text = read_journal(write(tmp_path / "events.jsonl", JOURNAL[:-1], entry_to_json(JOURNAL[-1])[:20]))
    assert list(text.entries) == JOURNAL[:-1]
    assert text.notes == (f"{tmp_path}/events.jsonl:{len(JOURNAL)}: this line is torn; left out",)


def test_last_line_without_its_newline(tmp_path):
    """A whole entry counts although an editor took its newline away."""
    text = read_journal(write(tmp_path / "mine.jsonl", JOURNAL[:-1], entry_to_json(JOURNAL[-1])))
    assert list(text.entries) == JOURNAL


def test_line_torn_in_the_middle(tmp_path):
    """An entry that is lost in the middle is named, with the line that has its rest."""
    file = tmp_path / "events.jsonl"
    write(file, JOURNAL[:1], entry_to_json(JOURNAL[1])[:20] + b"\n")
    with file.open("ab") as rest:
        rest.writelines(entry_to_json(entry) + b"\n" for entry in JOURNAL[2:])
    assert problem(file) == (
        f"{file}: entry 2 is missing ({file}:2: this line is torn; left out); a replay needs all from 1 on"
    )


def test_missing_entries(tmp_path):
    """A hole is told by its numbers."""
    file = write(tmp_path / "events.jsonl", [*JOURNAL[:1], *JOURNAL[4:]])
    assert problem(file) == f"{file}: entries 2 to 4 are missing; a replay needs all from 1 on"


def test_missing_parts(tmp_path):
    """A journal that was rotated needs its older parts."""
    file = write(tmp_path / "events.jsonl", JOURNAL[2:])
    assert problem(file) == (
        f"{file}: begins with entry 3; its older parts (events.1.jsonl, …) belong beside it:"
        " a replay needs all from 1 on"
    )


def test_event_of_a_newer_version(tmp_path):
    """What only a newer version knows cannot be passed over: decisions may follow from it."""
    file = write(tmp_path / "events.jsonl", JOURNAL[:1], b'{"n": 2, "t": 1000.0, "event": "node_cloned"}\n')
    assert problem(file) == (
        f"{file}:2: holds the event `node_cloned`, which this version does not know;"
        " replay it with a newer nvrx-slurm"
    )


def test_event_that_lacks_a_field(tmp_path):
    """A known event that cannot be read is told with its field."""
    file = write(tmp_path / "events.jsonl", [], b'{"n": 1, "t": 1.0, "event": "node_lost", "node": "n1"}\n')
    assert problem(file) == (
        f"{file}:1: `node_lost`: a line of the journal cannot be read: Object missing required field `incarnation`"
    )


@pytest.mark.parametrize("content", [b"", b"not json\n", b'{"a": 1}\n', b"[1]\n", b"\x00\xff\n", b"\n\n"])
def test_no_journal_at_all(tmp_path, content):
    """Whatever else somebody names, the message says what to name."""
    (tmp_path / "x").write_bytes(content)
    assert problem(tmp_path / "x").endswith("name an events.jsonl, or a job's folder")


def test_no_file(tmp_path):
    """A file that is not there is named."""
    assert problem(tmp_path / "gone.jsonl") == f"{tmp_path}/gone.jsonl: cannot be read: No such file or directory"


def test_plan(tmp_path):
    """The plan is read, or the message says which option names one."""
    (tmp_path / "plan.json").write_bytes(plan_to_json(plain()))
    assert read_plan(tmp_path / "plan.json") == plain()
    with pytest.raises(ConfigError, match="name that with --plan"):
        read_plan(tmp_path / "gone.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match=r"bad\.json: is no plan\.json: "):
        read_plan(tmp_path / "bad.json")
