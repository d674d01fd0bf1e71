"""The memory cgroup, in folders laid out as the kernel lays out its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.diagnostics.resources import MemoryCgroup, memory_cgroup

V1 = "9:name=systemd:/\n4:memory,x:/slurm/job\n0::/\n"
V2 = "0::/slurm/job\n"
EVENTS = "low 0\nhigh 0\nmax 12\noom 3\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


def lay_out(root: Path, version: int, kills: int = 0) -> MemoryCgroup | None:
    """Write the files of a job whose limit is set one level above."""
    own, job = root / "self", root / ("memory/slurm/job" if version == 1 else "slurm/job")
    job.mkdir(parents=True, exist_ok=True)
    own.write_text(V1 if version == 1 else V2)
    if version == 1:
        (job / "memory.oom_control").write_text(CONTROL.format(kills))
        (job / "memory.limit_in_bytes").write_text("9223372036854771712\n")
        (job.parent / "memory.limit_in_bytes").write_text(f"{600 << 20}\n")
        (job.parent / "memory.usage_in_bytes").write_text(f"{150 << 20}\n")
    else:
        (job / "memory.events").write_text(EVENTS.format(kills))
        (job / "memory.max").write_text("max\n")
        (job.parent / "memory.max").write_text(f"{600 << 20}\n")
        (job.parent / "memory.current").write_text(f"{150 << 20}\n")
    return memory_cgroup(root, own)


@pytest.mark.parametrize("version", [1, 2])
def test_kills_are_counted_and_the_limit_is_found_above(tmp_path: Path, version: int) -> None:
    """This is so in both versions; a limit that means none is skipped."""
    found = lay_out(tmp_path, version, kills=2)
    assert found is not None
    assert found.oom_kills() == 2
    (usage,) = found.usage()
    assert usage == f"150.0 MiB in use of 600.0 MiB ({found.folder.parent})"
    assert found.limit_bytes() == 600 << 20
    lay_out(tmp_path, version, kills=3)
    assert found.oom_kills() == 3


@pytest.mark.parametrize(("own_bytes", "smallest_bytes"), [(900 << 20, 600 << 20), (300 << 20, 300 << 20)])
def test_the_smallest_limit_on_the_way_up_holds(tmp_path: Path, own_bytes: int, smallest_bytes: int) -> None:
    """A step may have a larger limit than its job."""
    found = lay_out(tmp_path, 2)
    assert found is not None
    (found.folder / "memory.max").write_text(f"{own_bytes}\n")
    (found.folder / "memory.current").write_text("0\n")
    assert found.limit_bytes() == smallest_bytes


@pytest.mark.parametrize("own", ["", "0::/\n", "4:memory:/gone\n", "torn"])
def test_no_cgroup_is_none(tmp_path: Path, own: str) -> None:
    """A node may have no such cgroup, or one whose folder is not visible from here."""
    (tmp_path / "self").write_text(own)
    assert memory_cgroup(tmp_path, tmp_path / "self") is None
    assert memory_cgroup(tmp_path, tmp_path / "missing") is None


def test_torn_files_say_nothing(tmp_path: Path) -> None:
    """A count that is no number is not known."""
    found = lay_out(tmp_path, 2)
    assert found is not None
    (found.folder / "memory.events").write_text("oom_kill many\n")
    assert found.oom_kills() is None
