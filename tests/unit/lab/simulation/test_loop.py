"""Virtual time."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
import warnings

import pytest

from nvrx_slurm.errors import SimulationStuck
from nvrx_slurm.lab.simulation.loop import BEGIN_S, VirtualClock, VirtualLoop, unawaited

FOREVER_S = 1e9


def test_time_jumps_to_the_next_timer(loop):
    """A year passes in two steps, exactly, on every clock."""
    clock = VirtualClock(loop)
    before = clock.wall()

    async def main() -> float:
        await asyncio.sleep(3600 * 24 * 365)
        return clock.monotonic()

    assert loop.run(main()) == BEGIN_S + 3600 * 24 * 365
    assert clock.wall() - before == 3600 * 24 * 365
    assert loop.steps < 10


def test_wall_clock_that_is_set_moves_no_timer(loop):
    """Setting the wall clock back does not change the monotonic clock."""
    clock = VirtualClock(loop, ahead_s=5_000.0 - BEGIN_S)
    clock.set_by(-3600.0)
    loop.run(asyncio.sleep(10.0))
    assert (clock.wall(), clock.monotonic()) == (1_410.0, BEGIN_S + 10.0)


def test_timers_come_in_order_of_their_time_and_then_of_their_making(loop):
    """Two timers that are due at the same time run in the order in which they were made; a cancelled one does not
    run, and advances no time."""
    ran: list[int] = []
    loop.call_later(2.0, ran.append, 3)
    loop.call_later(1.0, ran.append, 1)
    loop.call_later(1.0, ran.append, 2)
    loop.call_later(1.5, ran.append, 0).cancel()
    loop.call_later(FOREVER_S, ran.append, 4).cancel()
    loop.run(asyncio.sleep(2.0))
    assert ran == [1, 2, 3]
    with pytest.raises(SimulationStuck):
        loop.run(asyncio.Event().wait())
    assert loop.time() == BEGIN_S + 2.0


def test_timeouts_and_waits_are_asyncios_own(loop):
    """One timeout expires, another does not, and a wait returns the first of two."""

    async def main() -> list[float]:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3.0):
                await asyncio.sleep(4.0)
        async with asyncio.timeout(3.0):
            await asyncio.sleep(2.0)
        slow, fast = asyncio.create_task(asyncio.sleep(9.0)), asyncio.create_task(asyncio.sleep(1.0))
        done, _ = await asyncio.wait([slow, fast], timeout=5.0, return_when=asyncio.FIRST_COMPLETED)
        assert done == {fast}
        return [loop.time() - BEGIN_S]

    assert loop.run(main()) == [6.0]


def test_thread_takes_no_time(loop):
    """Work in a thread is done at once, and its exception is raised where it is awaited."""

    async def main() -> int:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return await asyncio.to_thread(sum, [1, 2])

    assert loop.run(main()) == 3
    assert loop.time() == BEGIN_S


def test_history_that_cannot_go_on_says_which_task_waits_where(loop):
    """If no step is left and the main task is not done, this is an error, not an endless wait."""
    with pytest.raises(SimulationStuck, match=r"the world: Event.wait at .*locks.py"):
        loop.run(asyncio.Event().wait())


def test_history_is_bounded_in_time_and_in_steps(loop):
    """A history that ends too late, and one that loops, have different errors."""
    with pytest.raises(SimulationStuck, match=r"did not end in its virtual time: 0\.000"):
        loop.run(asyncio.sleep(61.0), until_s=60.0)

    def turn() -> None:
        loop.call_soon(turn)

    turn()
    with pytest.raises(SimulationStuck, match="more than 1,000 steps"):
        loop.run(asyncio.sleep(1.0), most_steps=1_000)


def test_defect_of_the_simulation_itself_ends_the_run(loop):
    """An exception in a callback that belongs to no process is raised."""
    loop.call_later(1.0, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        loop.run(asyncio.sleep(2.0))


def test_collector_is_off_while_a_history_runs_and_on_again_after_it(loop):
    """Finalizers run after the history."""

    async def main() -> bool:
        return gc.isenabled()

    assert gc.isenabled()
    assert not loop.run(main())
    assert gc.isenabled()


def test_unfinished_tasks_are_closed_without_a_warning(loop):
    """A task that awaits in its `finally`, or that never began, is closed without a warning; filterwarnings=error
    would raise one."""
    heard: list[str] = []

    async def stubborn() -> None:
        try:
            await asyncio.sleep(FOREVER_S)
        finally:
            heard.append("closing")
            await asyncio.sleep(1.0)
            heard.append("never")

    loop.create_task(stubborn())
    loop.run(asyncio.sleep(1.0))
    loop.create_task(stubborn())
    loop.close()
    gc.collect()
    assert heard == ["closing"]


def test_tasks_that_a_finally_starts_while_the_loop_closes_are_closed_too():
    """However many there are, no coroutine is left that was never awaited."""
    loop = VirtualLoop()

    async def leave() -> None:
        await asyncio.sleep(1.0)

    async def stay() -> None:
        try:
            await asyncio.sleep(FOREVER_S)
        finally:
            await asyncio.gather(leave(), leave())

    async def main() -> None:
        for _ in range(300):
            asyncio.get_running_loop().create_task(stay())
        await asyncio.sleep(1.0)

    loop.run(main())
    with unawaited() as forgotten:
        loop.close()
        del loop
        gc.collect()
    assert forgotten == []


def test_coroutine_that_no_code_awaits_is_found(loop):
    """Other warnings are not changed."""

    async def forgotten() -> None:
        pass

    async def main() -> None:
        forgotten()

    with unawaited() as seen:
        loop.run(main())
        with pytest.raises(UserWarning):
            warnings.warn("another", UserWarning, stacklevel=1)
    assert [each.partition(" was never")[0].endswith("forgotten'") for each in seen] == [True]


def shuffled_history(seed: int) -> list[tuple[float, int]]:
    """Workers that are cancelled in the order of a set, awaited as sets, and draw from one random source."""
    loop, chance, seen = VirtualLoop(), random.Random(seed), list[tuple[float, int]]()

    async def work(number: int) -> None:
        try:
            for _ in range(1_000):
                await asyncio.sleep(chance.expovariate(10.0))
        finally:
            seen.append((loop.time(), number))
            await asyncio.sleep(chance.random())
            seen.append((loop.time(), number))

    async def main() -> None:
        tasks = {loop.create_task(work(number)) for number in range(40)}
        await asyncio.sleep(1.0)
        for task in tasks:
            task.cancel()
        while tasks:
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            seen.extend((loop.time(), 100) for task in done if task.cancelled())

    loop.run(main())
    loop.close()
    return seen


def test_same_seed_gives_the_same_order_of_everything():
    """This includes the order of sets, also in another process and under another hash seed."""
    here = shuffled_history(7)
    code = "from tests.unit.lab.simulation.test_loop import shuffled_history; print(shuffled_history(7))"
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        there = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert there.stdout.strip() == repr(here)
    assert shuffled_history(8) != here
