"""Simulated processes that are killed, frozen and thawed."""

from __future__ import annotations

import asyncio
import gc
import signal

import pytest

from nvrx_slurm.lab.simulation.loop import BEGIN_S, VirtualLoop
from nvrx_slurm.lab.simulation.process import SimulatedProcess

LONG_S = 1_000.0


class Diary:
    """The notes of processes, with their times."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.lines: list[tuple[float, str]] = []

    def note(self, what: str) -> None:
        self.lines.append((round(self._loop.time() - BEGIN_S, 6), what))


@pytest.fixture
def diary(loop):
    """An empty one."""
    return Diary(loop)


async def ticking(diary: Diary, name: str = "tick", every_s: float = 1.0) -> None:
    """Notes each second, and its end if it is cancelled."""
    try:
        while True:
            await asyncio.sleep(every_s)
            diary.note(name)
    finally:
        diary.note("finally")


def pass_time(loop: VirtualLoop, seconds: float) -> None:
    loop.run(asyncio.sleep(seconds))


def test_exit_code_is_what_main_returned(loop):
    """The code is a number, or 0 for None; other tasks are cancelled first, as by asyncio.run."""
    process, ended = SimulatedProcess(loop, "p"), []

    async def main() -> int:
        asyncio.create_task(asyncio.sleep(LONG_S)).add_done_callback(lambda task: ended.append(task.cancelled()))
        await asyncio.sleep(1.0)
        return 3

    loop.run(process.run(main()))
    assert (process.exit_code, process.alive, process.error) == (3, False, None)
    assert ended == [True]


def test_exception_ends_a_process_with_1_and_is_kept(loop):
    """The exception is in `error`, and the run raises none."""
    process = SimulatedProcess(loop, "p")

    async def main() -> None:
        raise ValueError("x")

    loop.run(process.run(main()))
    assert process.exit_code == 1
    assert isinstance(process.error, ValueError)


def test_killed_process_takes_no_more_steps(loop, diary):
    """No `finally`, cancellation, timeout or callback runs; nor when the process is garbage-collected."""
    process = SimulatedProcess(loop, "p")

    async def main() -> None:
        asyncio.get_running_loop().call_later(5.0, diary.note, "a callback")
        asyncio.get_running_loop().create_task(ticking(diary, "beside"))
        async with asyncio.timeout(3.0):
            await ticking(diary)

    process.run(main())
    pass_time(loop, 1.5)
    process.kill()
    pass_time(loop, LONG_S)
    gc.collect()
    assert diary.lines == [(1.0, "tick"), (1.0, "beside")]
    assert process.exit_code == -signal.SIGKILL


def test_reply_to_a_dead_process_continues_no_task(loop, diary):
    """The reply arrives, but no task of the dead process continues."""
    process, reply = SimulatedProcess(loop, "p"), loop.create_future()

    async def main() -> None:
        diary.note(await reply)

    process.run(main())
    pass_time(loop, 1.0)
    process.kill()
    reply.set_result("too late")
    pass_time(loop, 1.0)
    assert diary.lines == []


def test_watchers_of_a_death_are_called_in_order_and_outside_of_it(loop, diary):
    """Each watcher is called once, at the same time; its callbacks belong to no process."""
    process, child = SimulatedProcess(loop, "p"), SimulatedProcess(loop, "child")
    process.on_death(lambda: diary.note("connection closed"))
    process.on_death(child.kill)
    process.on_death(lambda: loop.call_later(1.0, diary.note, "later"))
    child.on_death(lambda: diary.note("child dead"))
    process.run(ticking(diary))
    child.run(ticking(diary))
    pass_time(loop, 0.5)
    process.kill()
    process.kill()
    assert diary.lines == [(0.5, "connection closed"), (0.5, "child dead")]
    pass_time(loop, 2.0)
    assert diary.lines[2:] == [(1.5, "later")]
    process.on_death(lambda: diary.note("told at once"))
    assert diary.lines[-1] == (2.5, "told at once")


def test_frozen_process_holds_what_is_due_and_does_it_after_the_thaw(loop, diary):
    """A timer that was due meanwhile fires late and once; replies and timers keep their order."""
    process, reply = SimulatedProcess(loop, "p"), loop.create_future()

    async def listen() -> None:
        diary.note(await reply)

    async def main() -> None:
        asyncio.get_running_loop().create_task(listen())
        await ticking(diary, every_s=2.0)

    process.run(main())
    pass_time(loop, 1.0)
    process.freeze()
    assert process.frozen
    reply.set_result("reply")
    pass_time(loop, 9.0)
    assert diary.lines == []
    process.thaw()
    pass_time(loop, 2.5)
    assert diary.lines == [(10.0, "reply"), (10.0, "tick"), (12.0, "tick")]


def test_timeout_passes_while_frozen(loop, diary):
    """A process that thaws after the timeout gets TimeoutError."""
    process = SimulatedProcess(loop, "p")

    async def main() -> None:
        try:
            async with asyncio.timeout(2.0):
                await asyncio.sleep(3.0)
        except TimeoutError:
            diary.note("too late")

    process.run(main())
    pass_time(loop, 1.0)
    process.freeze()
    pass_time(loop, 9.0)
    process.thaw()
    pass_time(loop, 0.0)
    assert diary.lines == [(10.0, "too late")]


@pytest.mark.parametrize("steps", range(4))
def test_process_freezes_between_two_of_its_steps(loop, diary, steps):
    """It freezes after `steps` more steps, at an await; the thaw continues with the next one."""
    process = SimulatedProcess(loop, "p")

    async def main() -> None:
        for number in range(6):
            diary.note(number)
            await asyncio.sleep(0.0)

    process.run(main())
    process.freeze_after(steps)
    assert not process.frozen
    pass_time(loop, 1.0)
    assert process.frozen
    assert [what for _, what in diary.lines] == list(range(steps))
    process.thaw()
    pass_time(loop, 1.0)
    assert [what for _, what in diary.lines] == list(range(6))
    assert process.exit_code == 0


def test_process_that_is_thawed_before_its_freeze_goes_on(loop, diary):
    """The freeze is cancelled."""
    process = SimulatedProcess(loop, "p")
    process.run(ticking(diary))
    process.freeze_after(3)
    process.thaw()
    pass_time(loop, 5.5)
    assert process.running and len(diary.lines) == 5


def test_frozen_process_can_be_killed_and_not_thawed_after_it(loop, diary):
    """SIGKILL works on a frozen process; a dead process stays dead."""
    process = SimulatedProcess(loop, "p")
    process.run(ticking(diary))
    pass_time(loop, 0.5)
    process.freeze()
    pass_time(loop, 5.0)
    process.signal(signal.SIGKILL)
    process.thaw()
    process.signal(signal.SIGTERM)
    pass_time(loop, 5.0)
    assert diary.lines == []
    assert (process.alive, process.frozen, process.exit_code) == (False, False, -signal.SIGKILL)


def test_process_that_makes_another_does_not_own_it(loop, diary):
    """The child runs on when its parent is killed, and each timer belongs to the process that made it."""
    parent, child = SimulatedProcess(loop, "parent"), SimulatedProcess(loop, "child")

    async def main() -> None:
        child.run(ticking(diary, "child"))
        await ticking(diary, "parent")

    parent.run(main())
    pass_time(loop, 1.5)
    parent.kill()
    pass_time(loop, 1.0)
    assert diary.lines == [(1.0, "parent"), (1.0, "child"), (2.0, "child")]


def test_kernel_can_have_a_process_take_a_step(loop, diary):
    """The step is delayed while the process is frozen, dropped when it is dead, and its timers belong to the
    process."""
    process = SimulatedProcess(loop, "p")
    process.run(asyncio.sleep(LONG_S, 0))
    process.call_later(1.0, lambda: loop.call_later(1.0, diary.note, "its own"))
    pass_time(loop, 1.5)
    process.freeze()
    process.call_later(0.0, diary.note, "held")
    pass_time(loop, 1.5)
    process.thaw()
    pass_time(loop, 0.0)
    assert diary.lines == [(3.0, "held"), (3.0, "its own")]
    process.call_later(1.0, diary.note, "dropped")
    process.kill()
    pass_time(loop, 2.0)
    assert len(diary.lines) == 2


def test_signals_go_to_the_handler_of_their_process(loop, diary):
    """A signal without a handler ends the process; a frozen process handles it after the thaw."""
    first, second = SimulatedProcess(loop, "first"), SimulatedProcess(loop, "second")

    async def main(name: str) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, diary.note, name)
        await asyncio.sleep(LONG_S)

    first.run(main("first"))
    second.run(main("second"))
    pass_time(loop, 1.0)
    second.signal(signal.SIGSTOP)
    for process in (first, second):
        process.signal(signal.SIGTERM)
    pass_time(loop, 1.0)
    second.signal(signal.SIGCONT)
    pass_time(loop, 1.0)
    assert diary.lines == [(1.0, "first"), (2.0, "second")]
    first.signal(signal.SIGINT)
    pass_time(loop, 0.0)
    assert first.exit_code == -signal.SIGINT
    with pytest.raises(RuntimeError):
        loop.add_signal_handler(signal.SIGTERM, print)


def test_unhandled_errors_of_a_process_are_recorded_with_its_name(loop):
    """A callback raises, and so does a task that no code awaits: the process goes on, and the errors are recorded
    with its name."""
    process = SimulatedProcess(loop, "p")

    async def fail() -> None:
        raise ValueError("unheard")

    async def main() -> int:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        failing = asyncio.create_task(fail())
        await asyncio.sleep(1.0)
        assert failing.done()
        return 5

    loop.run(process.run(main()))
    assert process.exit_code == 5
    assert [(name, type(error)) for name, error in loop.troubles] == [("p", ZeroDivisionError), ("p", ValueError)]
