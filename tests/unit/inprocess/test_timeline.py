"""The report of a restart fits into one datagram, for any error, and never delays or fails the group."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.errors import MalformedRecord
from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord
from nvrx_slurm.inprocess.timeline import RankTimeline, Restart, RestartPart, send_to_agent, shortened
from nvrx_slurm.journal.restarts import LONGEST_BYTES, MOST_MISSING, MOST_RANKS, decode, encode

NO_RECORD: Any = object()
RAISED = InterruptionRecord(3, Interruption.EXCEPTION, "ValueError: no such layer: 49\nmore", "n2", "a long stack")


def restart(ranks: int = 2, records: tuple[InterruptionRecord, ...] = (RAISED,), **more: object) -> Restart:
    """A restart in which rank r took r milliseconds for each phase."""
    timelines = tuple(
        RankTimeline(member=rank, rank=rank, host=f"n{rank}", phases=dict.fromkeys(RestartPart, rank / 1000))
        for rank in range(ranks)
    )
    fields = {"at": 1.0, "group": "g", "call": 0, "iteration": 2, "active_world_size": ranks, "missing": (), **more}
    return Restart(**fields, world_size=ranks, records=records, ranks=timelines)  # type: ignore[arg-type]


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket on which an agent listens for its workers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.setblocking(False)
        monkeypatch.setenv("NVRX_BEAT_SOCKET", str(tmp_path / "s"))
        yield listener


def test_cause_phases_and_slowest_ranks_are_kept() -> None:
    """The report has the rank that raised, its error and place; the longest time of each phase with its rank; and the
    phases of the slowest ranks."""
    report = shortened(restart(ranks=20))
    assert report.cause == "exception on rank 3 (ValueError: no such layer: 49)"
    assert (report.faults[0].rank, report.faults[0].host, report.faults[0].text) == (
        3,
        "n2",
        "ValueError: no such layer: 49",
    )
    assert (report.phases["aborted"], report.slowest["aborted"]) == (0.019, 19)
    assert [each.rank for each in report.ranks] == list(range(19, 19 - MOST_RANKS, -1))
    assert report.total_s == pytest.approx(0.019 * len(RestartPart))


def test_16384_ranks_fit_into_one_datagram(agent: socket.socket) -> None:
    """The report has the numbers of all ranks, and the names of some."""
    missing = tuple(range(0, 16_384, 2))
    send_to_agent(restart(ranks=16_384, missing=missing))
    report = decode(agent.recv(LONGEST_BYTES + 1))
    assert (report.world_size, report.lost, report.missing) == (16_384, len(missing), missing[:MOST_MISSING])


texts = st.text(st.characters(codec=None), max_size=2000)


@given(st.lists(st.builds(InterruptionRecord, st.none(), st.sampled_from(Interruption), texts, texts), max_size=40))
def test_any_error_fits_into_one_datagram(records: list[InterruptionRecord]) -> None:
    """With control characters, lone surrogates and long host names, the datagram is bounded and has what fits."""
    data = encode(shortened(restart(records=tuple(records))))
    assert len(data) <= LONGEST_BYTES
    assert data.startswith(b"{")
    assert decode(data).iteration == 2


def test_without_an_agent_nothing_happens(
    agent: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under another launcher nothing is sent, and the restart is not even read."""
    monkeypatch.delenv("NVRX_BEAT_SOCKET")
    send_to_agent(restart())
    with pytest.raises(BlockingIOError):
        agent.recv(LONGEST_BYTES)
    send_to_agent(restart(records=(NO_RECORD,)))
    assert caplog.messages == []


def test_what_cannot_be_encoded_is_a_warning(agent: socket.socket, caplog: pytest.LogCaptureFixture) -> None:
    """The group has restarted, and does not fail because a line of the journal is missing."""
    send_to_agent(restart(records=(NO_RECORD,)))
    (record,) = caplog.records
    assert (record.levelname, record.exc_info and record.exc_info[0]) == ("WARNING", AttributeError)
    with pytest.raises(BlockingIOError):
        agent.recv(LONGEST_BYTES)


def test_an_agent_that_is_gone_costs_the_group_nothing(
    agent: socket.socket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no error and no warning; a new agent at the same socket gets the next restart."""
    agent.close()
    send_to_agent(restart())  # refused: the socket's file exists, and no process reads it
    (tmp_path / "s").unlink()
    send_to_agent(restart())  # no such file
    assert caplog.messages == []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as successor:
        successor.bind(str(tmp_path / "s"))
        successor.setblocking(False)
        send_to_agent(restart(iteration=7))
        assert decode(successor.recv(LONGEST_BYTES)).iteration == 7


def test_an_agent_that_does_not_read_is_not_waited_for(agent: socket.socket) -> None:
    """When its queue is full, further reports are lost; earlier ones can still be read."""
    for number in range(2000):
        send_to_agent(restart(iteration=number))
    assert decode(agent.recv(LONGEST_BYTES)).iteration == 0
    left = 0
    with contextlib.suppress(BlockingIOError):
        while agent.recv(LONGEST_BYTES):
            left += 1
    assert left < 1999


@pytest.mark.parametrize("word", [b"{", b"{}", b'{"iteration": "x"}', b"{\xff}"])
def test_what_is_no_restart_is_refused(word: bytes) -> None:
    """The agent drops such a datagram, as any other invalid one."""
    with pytest.raises(MalformedRecord):
        decode(word)
