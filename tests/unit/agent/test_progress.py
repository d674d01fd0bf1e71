"""What workers report by datagram: first steps, exceptions, and restarts in process."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvrx_slurm.agent.progress import LONGEST_ERROR, ProgressBoard
from nvrx_slurm.journal.folder import clear_runtime_folders
from nvrx_slurm.journal.restarts import InProcessRestart, encode
from nvrx_slurm.util.files import JobFiles

RESTART = InProcessRestart(cause="exception on rank 1", iteration=1, world_size=2, active_world_size=2, total_s=0.1)


class Ears:
    """Records each report with its kind."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.last = asyncio.Event()

    def first_step(self, rank: int, step: int) -> None:
        self.heard.append(("step", rank, step))
        self.last.set()

    def failing(self, rank: int, pid: int, what: str, at: float | None) -> None:
        self.heard.append(("failing", rank, pid, what, at))

    def restart(self, restart: InProcessRestart) -> None:
        self.heard.append(("restart", restart))


@pytest.fixture
def worker() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        yield channel


async def test_each_kind_of_report_is_passed_on_and_nonsense_is_not(tmp_path: Path, worker: socket.socket) -> None:
    """Three kinds of datagram, distinguished by their first byte, are passed on; anything else is ignored."""
    ears = Ears()
    (tmp_path / "board").mkdir()
    board = ProgressBoard(tmp_path / "board", ears.first_step, ears.failing, ears.restart)
    board.open()
    for rank in (1, 2):
        board.prepare(rank, 0)
    strangers = [b"9 5", b"!9 77@1.5 KeyError: 3", b"!1 77@noon KeyError: 3"]  # unknown ranks, and a bad time
    too_large = [b"2 %d" % (1 << 65), b"2 %d" % (1 << 63), b"2 -7", b"2 " + b"9" * 5_000]  # too large, or negative
    nonsense = [b'{"torn', b"{}", b"\xff", b"", *strangers, *too_large]
    words = [encode(RESTART), *nonsense, b"!1 77 KeyError: 3", b"!1 77@1.5 KeyError: 3", b"2 5"]
    for word in words:
        await asyncio.to_thread(worker.sendto, word, str(tmp_path / "board" / "s"))  # the kernel queues ten datagrams
    await asyncio.wait_for(ears.last.wait(), 20.0)
    board.close()
    failing = [("failing", 1, 77, "KeyError: 3", None), ("failing", 1, 77, "KeyError: 3", 1.5)]
    assert ears.heard == [("restart", RESTART), *failing, ("step", 2, 5)]


@pytest.mark.parametrize(
    ("written", "error"),
    [
        ({"message": {"message": "ValueError: bad\nand more", "extraInfo": {}}}, "ValueError: bad"),
        ({"message": "Signal 11 (SIGSEGV) received by PID 7"}, "Signal 11 (SIGSEGV) received by PID 7"),
        ({"message": {"message": "E" * 5_000}}, "E" * LONGEST_ERROR),
        ({"message": {}}, None),
        ({}, None),
        ([], None),
        ('{"torn', None),
        ("[" * 200_000, None),
        ({"message": {"message": "OSError: x \udce9"}}, "OSError: x ?"),
    ],
)
async def test_error_file_is_read_as_torch_writes_it(tmp_path: Path, written: Any, error: str | None) -> None:
    """An error file is read in torch's format, and ignored if it is torn or in another format; the next cycle's
    worker starts without one."""
    ears = Ears()
    (tmp_path / "board").mkdir()
    board = ProgressBoard(tmp_path / "board", ears.first_step, ears.failing, ears.restart)
    board.open()
    file = Path(board.prepare(3, 0)["TORCHELASTIC_ERROR_FILE"])
    assert board.recorded_error(3) is None
    text = written if isinstance(written, str) else json.dumps(written)
    file.write_text(text)  # noqa: ASYNC240  in memory
    assert board.recorded_error(3) == error
    board.prepare(3, 1)
    assert board.recorded_error(3) is None
    board.close()


async def test_half_a_copy_of_the_package_goes_with_its_cycle(tmp_path: Path) -> None:
    """An incomplete copy of the package, left by a worker that was killed while it made the copy, is removed with its
    cycle; the complete copy stays."""
    ears = Ears()
    board = ProgressBoard(tmp_path, ears.first_step, ears.failing, ears.restart)
    for name in ("lib.4711", "lib"):
        (tmp_path / name / "hook").mkdir(parents=True)
    board.clear()
    assert await asyncio.to_thread(os.listdir, tmp_path) == ["lib"]
    board.close()


async def test_a_long_node_name_fits_into_the_path_of_the_socket(tmp_path: Path) -> None:
    """Long node names, as clouds assign them, fit into the 107 bytes that unix(7) allows for a socket's path, even in
    a task of an array; similar names get separate folders."""
    job, queue = JobFiles(tmp_path / "1234567_999"), "queue-" + "x" * 50
    try:
        folder, other = job.make_runtime_folder(f"{queue}-dy-1"), job.make_runtime_folder(f"{queue}-dy-2")
        board = ProgressBoard(folder, lambda *_: None, lambda *_: None, lambda _: None)
        board.open()
        assert job.runtime_folders(f"{queue}-dy-2") == [other]
        board.close()
    finally:
        clear_runtime_folders(job)
