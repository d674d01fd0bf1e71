"""Memory, pressure, load and disks, as the kernel's files have them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from nvrx_slurm.diagnostics import resources
from nvrx_slurm.diagnostics.resources import format_size

MEMINFO = (
    "MemTotal:       24683944 kB\nMemFree: 1 kB\nMemAvailable:   12341972 kB\nSwapTotal: {} kB\nSwapFree: 0 kB\n"
)


def test_memory_says_what_is_available(tmp_path: Path) -> None:
    """Swap is included, if there is any."""
    (tmp_path / "meminfo").write_text(MEMINFO.format(0))
    assert list(resources.memory(tmp_path)) == ["11.8 GiB available of 23.5 GiB"]
    (tmp_path / "meminfo").write_text(MEMINFO.format(1024))
    assert list(resources.memory(tmp_path)) == ["11.8 GiB available of 23.5 GiB; swap 0 B available of 1.0 MiB"]


def test_available_memory_is_no_more_than_the_cgroups_limit(tmp_path: Path) -> None:
    """On a node with more memory the cgroup's limit counts; without a cgroup or a limit it is the node's memory; 0 if
    the kernel says nothing."""
    assert resources.available_bytes(None, tmp_path) == 0
    (tmp_path / "meminfo").write_text(MEMINFO.format(0))
    assert resources.available_bytes(None, tmp_path) == 12341972 << 10
    cgroup = resources.MemoryCgroup(tmp_path, "memory.events", "memory.current", "memory.max")
    assert resources.available_bytes(cgroup, tmp_path) == 12341972 << 10
    (tmp_path / "memory.current").write_text("5\n")
    (tmp_path / "memory.max").write_text(f"{1 << 30}\n")
    assert resources.available_bytes(cgroup, tmp_path) == 1 << 30


def test_pressure_is_the_kernels_own_line(tmp_path: Path) -> None:
    """There is a line for each resource that is measured; an older kernel measures none."""
    assert list(resources.pressure(tmp_path)) == []
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "io").write_text("some avg10=1.50 avg60=0 avg300=0 total=9\nfull avg10=0\n")
    assert list(resources.pressure(tmp_path)) == ["io some avg10=1.50 avg60=0 avg300=0 total=9"]


def test_load_says_how_long_the_node_is_up(tmp_path: Path) -> None:
    """The time since boot shows a reboot, which explains much."""
    (tmp_path / "loadavg").write_text("1.00 2.00 3.00 1/234 5678\n")
    (tmp_path / "uptime").write_text("61.25 100.00\n")
    assert list(resources.load(tmp_path)) == [f"1.00 2.00 3.00 on {os.cpu_count()} processors, up 61 s"]


@pytest.mark.parametrize("what", [resources.memory, resources.pressure, resources.load])
@pytest.mark.parametrize("text", ["", "torn", "MemTotal: many kB\n", "\0\xff"])
def test_torn_files_say_nothing(tmp_path: Path, what, text: str) -> None:
    """No value is guessed, and there is no error."""
    assert list(what(tmp_path)) == []
    for name in ("meminfo", "loadavg", "uptime"):
        (tmp_path / name).write_text(text)
    assert list(what(tmp_path)) == []


def test_a_disk_says_what_is_free(tmp_path: Path) -> None:
    """The sizes are those that the system gives; a disk that is missing has the reason."""
    here, gone = resources.disks([tmp_path, tmp_path / "gone"])
    total = format_size(shutil.disk_usage(tmp_path).total)
    assert here.startswith(f"{tmp_path}: ")
    assert f" free of {total}" in here
    assert gone == f"{tmp_path}/gone: No such file or directory"


def test_sizes_are_in_words() -> None:
    """There is one decimal, in the unit that fits."""
    assert [format_size(number) for number in (0, 1023, 1536, 5 << 30, 3 << 42)] == [
        "0 B", "1023 B", "1.5 KiB", "5.0 GiB", "12.0 TiB"
    ]  # fmt: skip


def test_each_gpu_is_one_sentence() -> None:
    """A value that a GPU does not count is left out; a line that is no row stays as it is."""
    said = "0, 00000000:07:00.0, 2, 5, 1, Yes, No, [N/A], 64\n1, 00000000:0F:00.0, [N/A], [N/A], 0, No, No, N/A, 30\n"
    assert list(resources.gpu_rows(said)) == [
        "0: bus 00000000:07:00.0, uncorrected errors since the driver was loaded 2, ever 5, rows remapped 1,"
        " pending Yes, failed No, temperature 64",
        "1: bus 00000000:0F:00.0, rows remapped 0, pending No, failed No, temperature 30",
    ]
    assert list(resources.gpu_rows("Unable to determine the device handle for GPU0000:07:00.0: Unknown Error")) == [
        "Unable to determine the device handle for GPU0000:07:00.0: Unknown Error"
    ]
