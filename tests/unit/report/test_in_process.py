"""Restarts in process, as `status` and `events` show them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from nvrx_slurm.journal.records import Entry, entry_from_json, entry_to_json
from nvrx_slurm.report import plain, snapshot
from nvrx_slurm.report.sentences import describe
from nvrx_slurm.util.clock import SystemClock
from tests.unit.report.recorder import Recorder, to_first_cycle, view_of, write


def restarted() -> Recorder:
    """Two restarts in cycle 0, the second one counted three times; then a worker is replaced, and one restart in
    cycle 1."""
    recorder = to_first_cycle()
    recorder.restart_in_process("n0", 1)
    recorder.restart_in_process("n0", 4, times=3)
    recorder.fail("n1", 2, signal=9)
    recorder.ready()
    recorder.start_workers()
    recorder.restart_in_process("n0", 1)
    return recorder


def test_they_are_counted_apart_from_those_of_workers(tmp_path: Path) -> None:
    """They are counted for the job and for each cycle; restarts of the replica are not among them, and they spend no
    budget."""
    status = msgspec.json.decode(
        msgspec.json.encode(snapshot.as_status(snapshot.take(write(tmp_path, restarted()), live=False)))
    )
    assert (status["restarts"], status["restarts_left"], status["restarts_in_process"]) == (1, 2, 5)
    assert [cycle["restarts_in_process"] for cycle in status["cycles"]] == [4, 1]
    last = status["last_in_process"]
    assert (last["cycle"], last["iteration"], last["cause"]) == (1, 1, "exception on rank 1 (KeyError: 3)")


def test_the_page_shows_the_last_one(tmp_path: Path) -> None:
    """It shows how many there were, and when, why and for how long the last one happened; a job without any has no
    such line."""
    recorder = restarted()
    recorder.finish()
    shot = snapshot.take(write(tmp_path, recorder), live=False, clock=SystemClock())
    assert "in process  5 restarts; the last in 42.0 ms, " in plain.page(shot)
    assert "after the start: exception on rank 1 (KeyError: 3)" in plain.page(shot)
    assert "in process" not in plain.page(snapshot.take(write(tmp_path, to_first_cycle()), live=False))


def test_no_node_and_no_replica_changes() -> None:
    """The ranks keep running: phases, steps and the last failure do not change."""
    recorder = to_first_cycle()
    before = view_of(recorder)
    recorder.restart_in_process("n0", 1)
    after = view_of(recorder)
    assert (after.nodes, after.replicas, after.last_failure) == (before.nodes, before.replicas, before.last_failure)


def test_an_event_is_one_line_that_says_why_and_what_took_longest() -> None:
    """It has iteration, world, time, the three longest phases, and the cause."""
    recorder = restarted()
    said = [describe(entry.record) for entry in recorder.entries if "iteration" in describe(entry.record)]
    took = "42.0 ms (aborted 30.0 ms, synchronised 9.0 ms, left 2.0 ms)"
    world = "with world size 8: exception on rank 1 (KeyError: 3)"
    assert said[:2] == [
        f"main-0 cycle 0 restarted in process in {took}, as iteration 1 {world}",
        f"main-0 cycle 0 restarted in process 3 times, the last time in {took}, as iteration 4 {world}",
    ]


def test_the_journal_line_gives_it_back() -> None:
    """The line is one JSON object with the restart in it."""
    entries: list[Entry] = restarted().entries
    assert [entry_from_json(entry_to_json(entry)) for entry in entries] == entries
