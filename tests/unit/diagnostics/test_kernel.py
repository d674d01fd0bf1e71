"""The kernel's messages: what one record contains, and which records are new."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.diagnostics.kernel import FIRST_KEPT, LAST_KEPT, KernelLog, KernelMessage, parse_record

RECORDS = {
    b"4,1234,987654321,-;NVRM: Xid (PCI:0000:07:00): 79, GPU has fallen off the bus.\n SUBSYSTEM=pci\n DEVICE=+p\n":
    KernelMessage(987.654321, 4, 0, "NVRM: Xid (PCI:0000:07:00): 79, GPU has fallen off the bus."),
    b"30,5,1000000,c;systemd[1]: started": KernelMessage(1.0, 6, 3, "systemd[1]: started"),
    b"3,5,0,-,caller=T1;a\\x0ab\\x5cc \\xc3\\xa9\n": KernelMessage(0.0, 3, 0, "a b\\c é"),
    b"": None,
    b"no record": None,
}  # fmt: skip


@pytest.mark.parametrize(("record", "message"), RECORDS.items())
def test_a_record_is_one_message(record: bytes, message: KernelMessage | None) -> None:
    """It has the time, level and facility, and the text without escapes, on one line and without the dictionary."""
    assert parse_record(record) == message


@given(st.binary(max_size=200))
def test_no_bytes_are_too_strange(data: bytes) -> None:
    """Any bytes after the head become one line of text."""
    message = parse_record(b"6,1,2,-;" + data)
    assert message is not None
    assert "\n" not in message.text


@pytest.fixture
def log(tmp_path: Path) -> Iterator[tuple[KernelLog, int]]:
    """A log, and the descriptor to write to it: a pipe that keeps writes apart, as /dev/kmsg does."""
    reading, writing = os.pipe2(os.O_DIRECT | os.O_CLOEXEC | os.O_NONBLOCK)
    there = KernelLog(Path(f"/proc/self/fd/{reading}"))
    yield there, writing
    there.close()
    os.close(reading)
    os.close(writing)


def say(writing: int, text: str, level: int = 4) -> None:
    os.write(writing, f"{level},1,1000000,-;{text}\n".encode())


def test_what_was_said_since_the_last_time_is_news(log: tuple[KernelLog, int]) -> None:
    """Each message is returned once, without waiting for more."""
    there, writing = log
    assert there.news() == []
    say(writing, "a")
    say(writing, "debugging", level=7)
    say(writing, "b")
    assert [message.text for message in there.news()] == ["a", "b"]
    assert there.news() == []


def test_of_a_flood_the_beginning_and_the_end_are_kept(tmp_path: Path) -> None:
    """The first messages show what started the flood, and the last how it ended."""

    class Flooded(KernelLog):
        def _read(self) -> Iterator[KernelMessage]:
            return (KernelMessage(0.0, 4, 0, str(number)) for number in range(10_000))

    there = Flooded(Path("/dev/null"))
    texts = [message.text for message in there.news()]
    there.close()
    assert len(texts) == FIRST_KEPT + LAST_KEPT
    assert (texts[0], texts[FIRST_KEPT - 1], texts[-1]) == ("0", str(FIRST_KEPT - 1), "9999")


def test_a_log_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    """The caller reports the error."""
    with pytest.raises(FileNotFoundError):
        KernelLog(tmp_path / "kmsg")
