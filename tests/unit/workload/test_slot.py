"""The agent's side of a slot, and what it promises to a writer and a reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.workload.slot import SLOT_BYTES, Slot, map_slot


def test_a_fresh_slot_has_no_step(tmp_path: Path) -> None:
    """Before the first beat: no step, no beat, no time."""
    assert Slot.create(tmp_path / "slot").read() == (None, 0, 0)


def test_a_slot_is_64_bytes_for_its_owner_alone(tmp_path: Path) -> None:
    """Nobody else may read or write it, and nothing is left beside it."""
    Slot.create(tmp_path / "slot").close()
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == b"\xff" * 8 + bytes(SLOT_BYTES - 8)


def test_the_layout_is_three_little_endian_numbers(tmp_path: Path) -> None:
    """Another implementation may write it with nothing but the table in the module."""
    slot = Slot.create(tmp_path / "slot")
    with (tmp_path / "slot").open("r+b") as file:
        for number in (5, 6, 7):
            file.write(number.to_bytes(8, "little"))
    assert slot.read() == (5, 6, 7)


def test_a_late_writer_of_an_older_cycle_is_not_heard(tmp_path: Path) -> None:
    """A worker that still has the old slot goes on undisturbed, and the new one stays fresh."""
    old = Slot.create(tmp_path / "slot")
    writer = map_slot(tmp_path / "slot")
    new = Slot.create(tmp_path / "slot")
    writer[0] = 99
    assert old.read()[0] == 99
    assert new.read() == (None, 0, 0)


def test_a_closed_slot_cannot_be_read(tmp_path: Path) -> None:
    """It says so rather than showing old numbers; closing it does not concern the worker."""
    slot = Slot.create(tmp_path / "slot")
    writer = map_slot(tmp_path / "slot")
    slot.close()
    writer[0] = 1
    with pytest.raises(ValueError, match="released"):
        slot.read()


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """The agent learns at once that its workers could not beat."""
    with pytest.raises(FileNotFoundError):
        Slot.create(tmp_path / "missing" / "slot")


WRITER = """
import sys
from nvrx_slurm.workload.slot import map_slot
words = map_slot(sys.argv[1])
print("ready", flush=True)
while True:
    words[0] = 0
    words[0] = 0x7F7F7F7F7F7F7F7F
"""


def test_a_step_is_never_seen_half_written(tmp_path: Path) -> None:
    """While a process writes two very different steps in turn, a reader meets only these two, and both of them."""
    slot = Slot.create(tmp_path / "slot")
    command = [sys.executable, "-c", WRITER, str(tmp_path / "slot")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        seen: set[int | None] = set()
        reads = 0
        while reads < 20_000 or not {0, 0x7F7F7F7F7F7F7F7F} <= seen:
            seen.add(slot.read()[0])
            reads += 1
        writer.kill()
    assert seen - {None} == {0, 0x7F7F7F7F7F7F7F7F}
