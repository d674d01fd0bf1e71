"""A replay makes the same decisions, or shows where journal and core differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec.plan import plan_from_json, plan_to_json
from nvrx_slurm.journal.records import (
    ControllerStarted,
    Entry,
    FirstStepReached,
    NodeLost,
    Recovered,
    RendezvousClosed,
    RestartDecided,
    WorkerFailed,
    WorkersStarted,
    entry_from_json,
    entry_to_json,
)
from nvrx_slurm.lab.flow.replaying import Parting, differences, explain, read_journal, read_plan, replay
from tests.unit.core.fleet import Fleet, plain, running

JOURNALS = Path(__file__).with_name("journals")


@pytest.mark.parametrize("version", ["0.1"])
def test_a_journal_of_an_older_version_replays_to_the_same_decisions(version: str) -> None:
    """A worker failed, a node died, a spare took over: that version recorded it, with the names that it used."""
    folder = JOURNALS / version
    journal = [entry_from_json(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]
    replayed = replay(plan_from_json((folder / "plan.json").read_bytes()), journal)
    assert replayed.parting is None
    assert sum(isinstance(entry.record, RestartDecided) for entry in journal) == 2


def recovered_fleet() -> Fleet:
    """n1 died, n3 took its ranks, and the job ran to its end."""
    fleet = running()
    fleet.started("n1", "n2")
    fleet.now += 1.0
    fleet.lose("n1")
    fleet.now += 0.0123456789
    fleet.ready("n2")
    fleet.now += 1 / 3
    fleet.started("n3", "n2")
    fleet.step("n2", "n3")
    fleet.done("n3", "n2")
    fleet.leave("n2", "n3")
    return fleet


def place_of(journal: list[Entry], kind: type) -> int:
    return next(index for index, entry in enumerate(journal) if isinstance(entry.record, kind))


def renumbered(journal: list[Entry]) -> list[Entry]:
    return [msgspec.structs.replace(entry, n=n) for n, entry in enumerate(journal, start=1)]


def parting(journal: list[Entry]) -> Parting:
    found = replay(plain(), journal).parting
    assert found is not None
    return found


def test_same_decisions():
    """A journal that the core wrote has every decision that the core makes again."""
    journal = recovered_fleet().journal
    done = replay(plain(), journal)
    assert (done.parting, done.unwritten, done.entries) == (None, 0, len(journal))
    assert done.decisions == 11


def test_times_of_the_file():
    """The file has times in microseconds; durations computed from exact times are still equal."""
    journal = [entry_from_json(entry_to_json(entry)) for entry in recovered_fleet().journal]
    assert replay(plain(), journal).parting is None


def test_other_decision():
    """A decision that differs is shown beside the journal's, field by field, with the entries before it."""
    journal = recovered_fleet().journal
    at = place_of(journal, RestartDecided)
    journal[at] = msgspec.structs.replace(
        journal[at], record=msgspec.structs.replace(journal[at].record, action="stop", restarts_left=9)
    )
    said = explain(parting(journal), journal)
    assert said[0] == f"entry {at + 1} is where they part:"
    assert "    action: 'stop' in the journal, 'restart_replica' now" in said
    assert "    restarts_left: 9 in the journal, 3 now" in said
    assert any("node_lost" in line for line in said[said.index("  before it:") :])


def test_durations_that_differ():
    """A duration that differs by more than the file's precision is a difference."""
    journal = recovered_fleet().journal
    at = place_of(journal, Recovered)
    journal[at] = msgspec.structs.replace(
        journal[at], record=msgspec.structs.replace(journal[at].record, total_s=journal[at].record.total_s + 0.001)
    )
    assert isinstance(parting(journal).decided, Recovered)


def test_decision_that_the_journal_lacks():
    """If the journal lacks a decision of the core, the difference is at the next fact."""
    journal = recovered_fleet().journal
    del journal[place_of(journal, Recovered)]
    found = parting(renumbered(journal))
    assert found.recorded is None
    assert isinstance(found.decided, Recovered)
    assert "  the journal:  no decision" in explain(found, renumbered(journal))


def test_first_steps_that_an_older_controller_did_not_record():
    """A journal without such records replays; if a controller has begun to record them, a missing one is a
    difference."""
    journal = recovered_fleet().journal
    del journal[place_of(journal, FirstStepReached)]
    assert replay(plain(), renumbered(journal)).parting is None
    fleet = running()
    for _ in range(2):
        fleet.fail("n1")
        fleet.ready("n1", "n2")
        fleet.started("n1", "n2")
        fleet.step("n1", "n2")
    del fleet.journal[-1]
    fleet.done("n1", "n2")
    assert isinstance(parting(renumbered(fleet.journal)).decided, FirstStepReached)


def test_decision_that_the_core_does_not_make():
    """If the journal has a decision too many, the core's side is empty."""
    journal = recovered_fleet().journal
    at = place_of(journal, RendezvousClosed)
    journal.insert(at, journal[at])
    found = parting(renumbered(journal))
    assert isinstance(found.recorded, RendezvousClosed)
    assert (found.entry.n, found.decided) == (at + 2, None)


def test_fact_that_is_refused():
    """A fact that the core now takes for stale is a difference, since journals have no stale facts."""
    journal = recovered_fleet().journal
    at = place_of(journal, WorkersStarted)
    stale = msgspec.structs.replace(journal[at].record, incarnation="of another agent")
    journal[at] = msgspec.structs.replace(journal[at], record=stale)
    found = parting(journal)
    assert found.entry.n == at + 1
    assert "refuses this fact: it is stale" in "\n".join(explain(found, journal))


def test_plan_of_another_job():
    """A plan with other replicas is a difference at once, and raises no error."""
    journal = recovered_fleet().journal
    found = replay(plain(nodes=3), journal).parting
    assert found is not None
    assert explain(found, journal)


def test_decisions_that_a_dead_controller_did_not_write():
    """If a controller died between a fact and its decisions, this is no difference: its successor made them too."""
    journal = recovered_fleet().journal
    cut = place_of(journal, NodeLost) + 1
    assert replay(plain(), journal[:cut]).unwritten == 3
    again = Entry(n=cut + 1, t=journal[cut].t, record=ControllerStarted(epoch=2, host="h", pid=1))
    done = replay(plain(), [*journal[:cut], again])
    assert (done.parting, done.unwritten) == (None, 3)


# --------------------------------------------------------------------------------------- the files of a journal


WRITTEN = running().journal


def write_journal(path: Path, entries: Sequence[Entry], end: bytes = b"") -> Path:
    path.write_bytes(b"".join(entry_to_json(entry) + b"\n" for entry in entries) + end)
    return path


def problem(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_journal(path)
    return caught.value


def test_all_parts(tmp_path):
    """Given the folder or its file, the older parts beside it are read too."""
    for number in range(1, 4):
        write_journal(tmp_path / f"events.{number}.jsonl", WRITTEN[number - 1 : number])
    file = write_journal(tmp_path / "events.jsonl", WRITTEN[3:])
    assert list(read_journal(tmp_path).entries) == list(read_journal(file).entries) == WRITTEN


def test_torn_last_line(tmp_path):
    """A line that a writer did not finish is left out, and this is reported."""
    text = read_journal(write_journal(tmp_path / "events.jsonl", WRITTEN[:-1], entry_to_json(WRITTEN[-1])[:20]))
    assert list(text.entries) == WRITTEN[:-1]
    assert text.notes == (f"{tmp_path}/events.jsonl:{len(WRITTEN)}: this line is torn; left out",)


def test_last_line_without_its_newline(tmp_path):
    """The last entry is read although an editor removed its newline."""
    text = read_journal(write_journal(tmp_path / "mine.jsonl", WRITTEN[:-1], entry_to_json(WRITTEN[-1])))
    assert list(text.entries) == WRITTEN


def test_line_torn_in_the_middle(tmp_path):
    """The error for an entry that is damaged in the middle has the line with its rest."""
    file = tmp_path / "events.jsonl"
    write_journal(file, WRITTEN[:1], entry_to_json(WRITTEN[1])[:20] + b"\n")
    with file.open("ab") as rest:
        rest.writelines(entry_to_json(entry) + b"\n" for entry in WRITTEN[2:])
    error = problem(file)
    assert error.file == str(file)
    assert "entry 2 is missing" in str(error)
    assert f"{file}:2: this line is torn" in str(error)


def test_missing_entries(tmp_path):
    """The error has the numbers of the missing entries."""
    file = write_journal(tmp_path / "events.jsonl", [*WRITTEN[:1], *WRITTEN[4:]])
    assert "entries 2 to 4 are missing" in str(problem(file))


def test_missing_parts(tmp_path):
    """A rotated journal cannot be replayed without its older parts."""
    file = write_journal(tmp_path / "events.jsonl", WRITTEN[2:])
    error = problem(file)
    assert error.file == str(file)
    assert "begins with entry 3; its older parts (events.1.jsonl, …) belong beside it" in str(error)


def test_event_of_a_newer_version(tmp_path):
    """An event that only a newer version knows is an error: decisions may follow from it."""
    file = write_journal(tmp_path / "events.jsonl", WRITTEN[:1], b'{"n": 2, "t": 1000.0, "event": "node_cloned"}\n')
    error = problem(file)
    assert (error.file, error.line) == (str(file), 2)
    assert "`node_cloned`" in str(error)
    assert "replay it with a newer nvrx-slurm" in str(error)


def test_event_that_lacks_a_field(tmp_path):
    """The error for a known event that cannot be read names its field."""
    file = write_journal(tmp_path / "events.jsonl", [], b'{"n": 1, "t": 1.0, "event": "node_lost", "node": "n1"}\n')
    error = problem(file)
    assert (error.file, error.line) == (str(file), 1)
    assert "`node_lost`" in str(error)
    assert "`incarnation`" in str(error)


@pytest.mark.parametrize("content", [b"", b"not json\n", b'{"a": 1}\n', b"[1]\n", b"\x00\xff\n", b"\n\n"])
def test_no_journal_at_all(tmp_path, content):
    """The message for any other file says which file to give."""
    (tmp_path / "x").write_bytes(content)
    assert str(problem(tmp_path / "x")).endswith("name an events.jsonl, or a job's folder")


def test_no_file(tmp_path):
    """The error names the missing file."""
    assert problem(tmp_path / "gone.jsonl").file == str(tmp_path / "gone.jsonl")


def test_plan(tmp_path):
    """The plan is read, or the message names the option for it."""
    (tmp_path / "plan.json").write_bytes(plan_to_json(plain()))
    assert read_plan(tmp_path / "plan.json") == plain()
    with pytest.raises(ConfigError, match="name that with --plan"):
        read_plan(tmp_path / "gone.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match=r"bad\.json: is no plan\.json: "):
        read_plan(tmp_path / "bad.json")


def test_signal_of_an_older_journal():
    """An older journal has a signal's number as cause: the decision is the same as with the name that is written
    now."""
    fleet = running()
    fleet.tell(WorkerFailed(**fleet.by("n1"), replica="main-0", cycle=0, rank=0, signal=9))
    at = place_of(fleet.journal, RestartDecided)
    record = fleet.journal[at].record
    assert record.cause == "rank 0 on n1 was killed by SIGKILL"
    older = msgspec.structs.replace(record, cause="rank 0 on n1 was killed by signal 9")
    assert differences(older, record) == []
