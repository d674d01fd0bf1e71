"""The agent's side of a slot, and what writers and readers of it can rely on."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.workload.slot import SLOT_BYTES, OpenSection, Reading, Slot, map_slot


def test_a_fresh_slot_has_no_step(tmp_path: Path) -> None:
    """Before the first beat: no step, no beat, no time, no section."""
    assert Slot.create(tmp_path / "slot").read() == Reading()


def test_a_slot_is_a_page_for_its_owner_alone(tmp_path: Path) -> None:
    """Other users can neither read nor write it, and no other file is left in the folder."""
    Slot.create(tmp_path / "slot").close()
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == b"\xff" * 8 + bytes(SLOT_BYTES - 8)


def write(path: Path, **words: int) -> None:
    """Writes as another implementation would, by the table in the module alone: `w8=5` writes 5 into word 8."""
    with path.open("r+b") as file:
        for name, number in words.items():
            file.seek(8 * int(name.removeprefix("w")))
            file.write(number.to_bytes(8, "little"))


def write_name(path: Path, name: str) -> None:
    """Writes the name into the first row."""
    with path.open("r+b") as file:
        file.seek(8 * 8)
        file.write(name.encode().ljust(40, b"\0"))


def test_the_layout_is_as_the_table_says(tmp_path: Path) -> None:
    """Words written by the table are read as header, one name and one open section."""
    slot = Slot.create(tmp_path / "slot")
    write(tmp_path / "slot", w0=5, w1=6, w2=7, w3=8, w4=1234, w5=1)
    write_name(tmp_path / "slot", "prüfpunkt")
    write(tmp_path / "slot", w13=3, w14=2_500_000_000)
    write(tmp_path / "slot", w121=10**9, w122=256, w123=99 ^ 10**9 ^ 256 ^ 1234, w120=99)
    assert slot.read() == Reading(
        step=5,
        beats=6,
        sign_ns=7,
        largest_gap_ns=8,
        seen={"prüfpunkt": (3, 2.5)},
        open=(OpenSection("prüfpunkt", started_ns=99, timeout_s=1.0, main_thread=True),),
        in_section=True,
    )


@pytest.mark.parametrize(
    "spoilt", [{"w120": 0}, {"w120": 98}, {"w121": 1}, {"w122": 0}, {"w122": 31}, {"w123": 0}, {"w4": 1235}]
)
def test_an_entry_that_is_half_written_is_not_open(tmp_path: Path, spoilt: dict[str, int]) -> None:
    """An entry is not open if any of its words does not match the seal; a process that was killed may leave such
    entries."""
    slot = Slot.create(tmp_path / "slot")
    write_name(tmp_path / "slot", "x")
    entry = {"w4": 1234, "w120": 99, "w121": 50, "w122": 256, "w123": 99 ^ 50 ^ 256 ^ 1234}
    write(tmp_path / "slot", **entry)
    assert len(slot.read().open) == 1
    write(tmp_path / "slot", **spoilt)
    assert slot.read().open == ()


@given(st.binary(max_size=SLOT_BYTES - 64))
def test_a_reader_copes_with_any_bytes(page: bytes) -> None:
    """Reading a slot raises no error, even if a faulty worker has overwritten it with any bytes."""
    with tempfile.TemporaryDirectory() as folder:
        slot = Slot.create(Path(folder) / "slot")
        with (Path(folder) / "slot").open("r+b") as file:
            file.seek(64)
            file.write(page)
        assert slot.read().step is None
        slot.close()


def test_a_late_writer_of_an_older_cycle_is_not_read(tmp_path: Path) -> None:
    """A worker that still has the old slot can write to it, and the new slot stays empty."""
    old = Slot.create(tmp_path / "slot")
    writer = map_slot(tmp_path / "slot")
    new = Slot.create(tmp_path / "slot")
    writer[0] = 99
    assert old.read().step == 99
    assert new.read() == Reading()


def test_a_closed_slot_cannot_be_read(tmp_path: Path) -> None:
    """Reading raises an error instead of returning old numbers; the worker can still write."""
    slot = Slot.create(tmp_path / "slot")
    writer = map_slot(tmp_path / "slot")
    slot.close()
    writer[0] = 1
    with pytest.raises(ValueError, match="released"):
        slot.read()


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """The agent gets the error at once, before a worker could not beat."""
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
    """While a process writes two very different steps in turn, a reader reads both of them, and no other number."""
    slot = Slot.create(tmp_path / "slot")
    command = [sys.executable, "-c", WRITER, str(tmp_path / "slot")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        seen: set[int | None] = set()
        reads = 0
        while reads < 20_000 or not {0, 0x7F7F7F7F7F7F7F7F} <= seen:
            seen.add(slot.read().step)
            reads += 1
        writer.kill()
    assert seen - {None} == {0, 0x7F7F7F7F7F7F7F7F}
