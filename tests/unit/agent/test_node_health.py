"""What an agent records about its node: this machine's real kernel, cgroup and disks."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest

from nvrx_slurm.agent.node_health import NodeHealth
from nvrx_slurm.util.clock import SystemClock

LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z (health|kernel|kmsg|memory|cgroup|pressure|load|disk|gpu): ?"
)


def health_on(folder: Path) -> NodeHealth:
    return NodeHealth("n1", [folder, folder, Path("/tmp")], SystemClock())


@pytest.fixture
def no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has no nvidia-smi."""
    monkeypatch.setenv("PATH", str(tmp_path))


async def test_a_look_is_one_stamped_line_for_each_thing(tmp_path: Path, no_gpus: None) -> None:
    """A look writes one stamped line each for its reason, the memory, the load, and each file system once."""
    health, out = health_on(tmp_path), tmp_path / "health"
    health.begin()
    health.look(out, "rank 3 hangs")
    await health.close()
    lines = (out / "n1.txt").read_text().splitlines()
    assert lines[0].endswith(" health: n1: rank 3 hangs")
    assert all(LINE.match(line) for line in lines)
    told = [line.split(" ", 2)[1] for line in lines]
    assert {"memory:", "load:"} <= set(told)
    assert told.count("disk:") == 2
    assert (out / "n1.txt").stat().st_mode & 0o077 == 0


async def test_a_look_before_a_cycle_has_begun_has_no_news(tmp_path: Path, no_gpus: None) -> None:
    """Before a cycle has begun, a look for news writes nothing."""
    health, out = health_on(tmp_path), tmp_path / "health"
    health.look_for_news(out)
    await health.close()
    assert not out.exists()


async def test_nothing_new_is_not_written_down(tmp_path: Path, no_gpus: None) -> None:
    """A second look that finds nothing new adds no line except messages of the kernel."""
    health, out = health_on(tmp_path), tmp_path / "health"
    health.begin()
    health.look(out, "why")
    await health.close()
    before = (out / "n1.txt").read_text()
    health.look_for_news(out)
    await health.close()
    added = (out / "n1.txt").read_text().removeprefix(before)
    assert re.findall(r"Z (?!kernel|kmsg)\w+:", added) == []


async def test_what_nvidia_smi_says_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of nvidia-smi is one line per GPU."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, 00000000:07:00.0, 1, 1, 0, No, No, No, 50'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    health, out = health_on(tmp_path), tmp_path / "health"
    health.look(out, "why")
    await health.close()
    assert " gpu 0: bus 00000000:07:00.0, uncorrected errors" in (out / "n1.txt").read_text()


async def test_a_file_system_that_does_not_answer_delays_no_other_look(
    tmp_path: Path, no_gpus: None, caplog: pytest.LogCaptureFixture
) -> None:
    """A look at a file system that does not answer is given up after a bound, and the next look runs."""
    health, stuck, out = health_on(tmp_path), tmp_path / "stuck", tmp_path / "health"
    stuck.mkdir()
    os.mkfifo(stuck / "n1.txt")  # opening it blocks until a reader opens it
    health.look(stuck, "why")
    health.look(out, "again")
    async with asyncio.timeout(20):
        while not (out / "n1.txt").exists():  # noqa: ASYNC110  # a thread makes it, and sets no event
            await asyncio.sleep(0.01)
    assert "could not be read within" in caplog.text
    await health.close()
    assert "again" in (out / "n1.txt").read_text()
    os.close(os.open(stuck / "n1.txt", os.O_RDONLY | os.O_NONBLOCK))  # unblock the thread


async def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, no_gpus: None, caplog: pytest.LogCaptureFixture
) -> None:
    """If the folder cannot be written, a warning is logged: the job does not depend on it."""
    (tmp_path / "file").write_text("")
    health = health_on(tmp_path)
    health.look(tmp_path / "file", "why")
    await health.close()
    assert "the node's state was not written down" in caplog.text
