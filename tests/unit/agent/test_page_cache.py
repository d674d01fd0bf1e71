"""What the agent reads into the page cache, on a real disk; mincore(2) says which pages of a file are cached."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from nvrx_slurm.agent import page_cache
from nvrx_slurm.agent.page_cache import PageCache, matching
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.workload.slot import Reading
from tests.waiting import async_until

# The cache reads at idle priority: it waits while other processes keep the disk busy.
MIB = 1 << 20


def cached(path: Path) -> float:
    """The cached fraction of a file, from 0 to 1."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        held = (ctypes.c_ubyte * pages)()
        at = ctypes.c_char.from_buffer(mapped)
        assert ctypes.CDLL(None).mincore(ctypes.byref(at), ctypes.c_size_t(len(mapped)), held) == 0
        del at
        return sum(byte & 1 for byte in held) / pages


def whole(path: Path) -> bool:
    """Whether all of a file was read. The kernel may evict some of its pages at any time."""
    return cached(path) > 0.9


def evict(path: Path) -> None:
    """Drop a file's pages from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """A folder on a file system that evicts pages when asked to; tmpfs never does."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("NVRX_TEST_DISK")) as name:
        probe = Path(name) / "probe"
        probe.write_bytes(b"x" * MIB)
        evict(probe)
        if cached(probe) > 0.0:
            pytest.skip(f"{name} is on a file system that keeps its pages; NVRX_TEST_DISK may name another folder")
        yield Path(name)


@pytest.fixture
def folder(disk: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=disk) as name:
        yield Path(name)


@pytest.fixture
async def cache() -> AsyncIterator[PageCache]:
    """A page cache that looks only when the test asks for it, not by its timer."""
    cache = PageCache(SystemClock(), every_s=3600.0, spread_s=0.0)
    yield cache
    cache.stop()


def write(path: Path, size: int = MIB, *, newer_s: int = 0) -> Path:
    """Write a file that is not in the page cache, last changed `newer_s` after the others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    evict(path)
    os.utime(path, (1.7e9 + newer_s, 1.7e9 + newer_s))
    assert cached(path) == 0.0
    return path


async def looked(cache: PageCache) -> None:
    await async_until(lambda: cache._running is None)


async def test_standby_node_reads_what_matches(cache: PageCache, folder: Path) -> None:
    """A standby node reads each matching file completely, in subfolders too, and no other file; patterns are relative
    to the workers' folder."""
    wanted = [write(folder / "latest" / "a" / "b.pt", 3 * MIB + 17), write(folder / "latest" / "c.pt")]
    other = write(folder / "older" / "c.pt")
    cache.begin(["latest/**"], folder, None)
    await looked(cache)
    assert all(map(whole, wanted))
    assert cached(other) == 0.0
    assert (cache.files, cache.size) == (2, 4 * MIB + 17)


async def test_absolute_pattern_and_folder_with_odd_name(cache: PageCache, folder: Path) -> None:
    """Special characters in the name of the workers' folder are no pattern; an absolute pattern may match outside of
    that folder."""
    here, there = write(folder / "run[1]" / "x.pt"), write(folder / "data" / "y.pt")
    cache.begin(["*.pt", f"{folder}/data/*"], folder / "run[1]", None)
    await looked(cache)
    assert whole(here) and whole(there)


async def test_newest_files_come_first_and_no_more_than_the_bound(cache: PageCache, folder: Path) -> None:
    """Files are read newest first up to the bound: of three checkpoints the newest completely, the next in part, the
    oldest not at all."""
    oldest, middle, newest = (write(folder / f"{n}.pt", 64 * MIB, newer_s=n) for n in (1, 2, 3))
    cache.begin(["*.pt"], folder, 96 * MIB)
    await looked(cache)
    assert whole(newest)
    assert 0.4 < cached(middle) < 0.9  # the kernel reads a little ahead
    assert cached(oldest) == 0.0
    assert cache.size == 96 * MIB


async def test_without_a_bound_it_is_a_fourth_of_what_is_available(
    cache: PageCache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a bound a quarter of the available memory is used; here the node has 4 MiB."""
    monkeypatch.setattr(page_cache, "available_bytes", lambda _: 4 * MIB)
    write(folder / "1.pt", 4 * MIB)
    cache.begin(["*.pt"], folder, None)
    await looked(cache)
    assert cache.size == MIB


async def test_nothing_is_read_twice(cache: PageCache, folder: Path) -> None:
    """A second look reads only new and changed files, and none that the kernel has evicted meanwhile."""
    kept, changed = write(folder / "kept.pt"), write(folder / "changed.pt")
    cache.begin(["*.pt"], folder, None)
    await looked(cache)
    evict(kept)
    write(changed, 2 * MIB, newer_s=5)
    added = write(folder / "added.pt")
    cache.look()
    await looked(cache)
    assert (cached(kept), whole(changed), whole(added)) == (0.0, True, True)
    cache.begin(["k*.pt"], folder, None)  # nor does a new order read it again
    await looked(cache)
    assert cached(kept) == 0.0
    assert cache.files == 4


async def test_two_names_of_one_file_are_read_once(cache: PageCache, folder: Path) -> None:
    """A file with several names is read once: hard links, symbolic links, and overlapping patterns."""
    write(folder / "a.pt")
    (folder / "b.pt").hardlink_to(folder / "a.pt")
    (folder / "c.pt").symlink_to("a.pt")
    cache.begin(["*.pt", "a*"], folder, None)
    await looked(cache)
    assert cache.files == 1


async def test_ranks_are_those_of_the_node(cache: PageCache, folder: Path) -> None:
    """A node with ranks reads only the files of its ranks; a node without ranks reads those of any rank."""
    files = [write(folder / f"rank{rank}.pt") for rank in range(4)]
    latest = write(folder / "ranklatest.pt")
    cache.begin(["rank{rank}.pt"], folder, None, [2, 3])
    cache.look()
    await looked(cache)
    assert [cached(path) for path in (*files[:2], latest)] == [0.0] * 3
    assert all(map(whole, files[2:]))
    cache.begin(["rank{rank}.pt"], folder, None)
    await looked(cache)
    assert all(map(whole, files))
    assert cached(latest) == 0.0


def checkpoints(count: int) -> dict[int, Reading]:
    return {0: Reading(seen={"checkpoint": (count, 1.0), "STEP": (50, 1.0)}), 1: Reading()}


async def test_node_with_ranks_looks_after_a_checkpoint_only(cache: PageCache, folder: Path) -> None:
    """A node with ranks looks each time a checkpoint has ended: not at its start, when its workers load, and not for
    steps."""
    first = write(folder / "1.pt")
    cache.begin(["*.pt"], folder, None, [0])
    cache.saw(checkpoints(0))
    assert cache._running is None and cache._timer is None
    cache.saw(checkpoints(1))
    await async_until(lambda: cache.files == 1)
    assert whole(first)
    second = write(folder / "2.pt")
    cache.saw(checkpoints(2))
    await async_until(lambda: cache.files == 2)
    assert whole(second)


async def test_standby_node_looks_again_by_the_clock(folder: Path) -> None:
    """A standby node looks periodically, and finds what another node writes without a message from it."""
    cache = PageCache(SystemClock(), every_s=0.01)
    cache.begin(["*.pt"], folder, None)
    await looked(cache)
    later = write(folder / "later.pt")
    await async_until(lambda: cache.files == 1)
    assert whole(later)
    cache.stop()
    assert cache._timer is None


async def test_stop_ends_a_read_in_the_middle_of_a_file(cache: PageCache, folder: Path) -> None:
    """A stop ends the read in the middle of a large file; the file counts as unread, and the next order reads all of
    it."""
    path = write(folder / "large.pt", 1)
    os.truncate(path, 1 << 29)  # a hole: it fills the cache like any other content, and takes no time to write
    cache.begin(["*.pt"], folder, None)
    await async_until(lambda: cached(path) > 0.0)
    cache.stop()
    await looked(cache)
    assert cached(path) < 1.0
    assert cache.files == 0
    cache.look()  # does nothing: there is no order
    assert cache._running is None
    cache.begin(["*.pt"], folder, None)
    await looked(cache)
    assert cache.files == 1
    assert whole(path)


async def test_begin_while_the_thread_of_before_still_reads(cache: PageCache, folder: Path) -> None:
    """Only one thread reads at a time: a new order ends the thread of the order before, and is carried out after
    it."""
    first, second = write(folder / "first.pt", 64 * MIB), write(folder / "second.pt")
    cache.begin(["first.pt"], folder, None)
    running = cache._running
    cache.begin(["second.pt"], folder, None)
    assert cache._running is running
    await async_until(lambda: whole(second))
    assert cached(first) < 1.0


async def test_file_that_cannot_be_read_is_said_once(
    cache: PageCache, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that cannot be read is logged once, and the other files are read."""
    (folder / "bad.pt").symlink_to("/sys/bus/platform/uevent")  # a file whose read fails for root too
    good = write(folder / "good.pt")
    cache.begin(["*.pt"], folder, None)
    await looked(cache)
    cache.look()
    await looked(cache)
    assert whole(good)
    assert caplog.text.count("bad.pt: ") == 1


async def test_file_system_that_does_not_answer_holds_up_nothing(cache: PageCache, folder: Path) -> None:
    """A thread that the file system blocks is left behind: no second one is started, and the stop does not wait for
    it."""
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Stuck(SystemClock):
        def monotonic(self) -> float:  # what a look calls first
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
            return super().monotonic()

    cache.clock = Stuck()
    cache.begin(["*.pt"], folder, None)
    running = cache._running
    for _ in range(3):
        cache.look()
    assert cache._running is running
    cache.stop()
    assert running is not None and not running.done()
    release.set()
    await looked(cache)


def test_only_files_are_read(tmp_path: Path) -> None:
    """Folders, FIFOs and dangling links are not read; a pattern may match nothing."""
    os.mkfifo(tmp_path / "fifo.pt")
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "dangling.pt").symlink_to("nowhere")
    (tmp_path / "file.pt").write_text("x")
    found = list(matching(["*.pt", "nothing/**"], tmp_path, None))
    assert [each.path for each in found] == [str(tmp_path / "file.pt")]


def test_pattern_for_everything_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the maximum number of paths the look goes on with what it has."""
    monkeypatch.setattr(page_cache, "MOST_FILES", 3)
    for number in range(9):
        (tmp_path / f"{number}.pt").write_text("x")
    assert len(list(matching(["**/*.pt"], tmp_path, None))) == 3


async def test_no_pattern_is_no_look(cache: PageCache, tmp_path: Path) -> None:
    """Without a pattern no look runs."""
    cache.begin([], tmp_path, None)
    cache.look()
    assert cache._running is None


def test_thread_reads_at_idle_priority() -> None:
    """The reading thread has idle I/O priority (ioprio_get(2)); the rest of the process keeps its own."""
    import platform
    import threading

    number = {"x86_64": 252, "aarch64": 31}.get(platform.machine())
    if number is None:
        pytest.skip("the number of ioprio_get(2) is not known here")
    got = []

    def look() -> None:
        page_cache._be_idle()
        got.append(ctypes.CDLL(None).syscall(number, 1, 0))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert got[0] >> 13 == 3
    assert ctypes.CDLL(None).syscall(number, 1, 0) >> 13 != 3
