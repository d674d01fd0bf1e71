"""Virtual threads: blocking code in an order that a seed decides, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import pytest

from nvrx_slurm.errors import SimulationStuck
from nvrx_slurm.lab.simulation.threads import (
    HistoryPromises,
    Substitution,
    ThreadScheduler,
    VirtualDescriptors,
    VirtualPoller,
    VirtualProcess,
    VirtualThread,
)
from nvrx_slurm.lab.simulation.transport.promises import PayloadPromise

Errors = list[BaseException]


@pytest.fixture
def errors() -> Errors:
    return []


@pytest.fixture
def scheduler(errors: Errors) -> Iterator[ThreadScheduler]:
    made = ThreadScheduler(Random("threads"), lambda _, error: errors.append(error))
    yield made
    made.close()


def run(scheduler: ThreadScheduler, *mains: Callable[[], int | None], until_s: float = 100.0) -> list[VirtualProcess]:
    """Runs each function in a process of its own, until all have ended."""
    processes = [VirtualProcess(scheduler, f"p{number}", "host") for number in range(len(mains))]
    for process, main in zip(processes, mains, strict=True):
        process.start(main)
    scheduler.run(lambda: not any(process.alive for process in processes), until_s)
    return processes


def test_one_thread_at_a_time_has_a_lock(scheduler: ThreadScheduler) -> None:
    """Other threads wait until it is released."""
    names = Substitution(scheduler)
    lock, inside, most = names.threading.Lock(), [0], [0]

    def work() -> None:
        for _ in range(20):
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                scheduler.sleep(0.01)
                inside[0] -= 1

    def main() -> int:
        threads = [names.threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 7

    (process,) = run(scheduler, main)
    assert (most[0], process.exit_code) == (1, 7)


def test_a_lock_that_stays_taken_is_not_waited_for_beyond_the_timeout(scheduler: ThreadScheduler) -> None:
    """The wait ends in virtual time, exactly at the timeout."""
    names = Substitution(scheduler)
    lock = names.threading.Lock()
    lock.acquire()
    waited: list[tuple[bool, float]] = []

    def main() -> None:
        began = scheduler.now_s
        waited.append((lock.acquire(timeout=2.0), scheduler.now_s - began))

    run(scheduler, main)
    assert waited == [(False, 2.0)]


def test_a_killed_process_takes_no_step_and_no_finally(scheduler: ThreadScheduler) -> None:
    """The watchers of its death are called once."""
    steps: list[str] = []

    def main() -> None:
        try:
            scheduler.sleep(1.0)
            steps.append("slept")
        finally:
            steps.append("finally")

    process = VirtualProcess(scheduler, "killed", "host")
    process.on_death(lambda: steps.append("died"))
    process.start(main)
    scheduler.call_later(0.5, process.kill)
    scheduler.run(lambda: scheduler.now_s > 1_002.0 or not process.alive, 10.0)
    assert steps == ["died"]


def test_what_threads_do_while_a_history_is_closed_breaks_no_promise(scheduler: ThreadScheduler) -> None:
    """A thread of a killed process turns the end into another error, and reports that it has waited since the kill:
    this is ignored."""
    promises = HistoryPromises(scheduler)

    def waits() -> int:
        try:
            scheduler.sleep(50.0)
        except BaseException as error:
            promises.note(f"ends with {error!r}")
            promises.broke(PayloadPromise.DEADLINE, f"it has waited until {scheduler.now_s}")
        return 0

    def kills() -> int:
        victim = VirtualProcess(scheduler, "victim", "host")
        victim.start(waits)
        scheduler.sleep(1.0)
        victim.kill()
        scheduler.sleep(60.0)
        promises.note("the last line")
        return 0

    run(scheduler, kills)
    scheduler.close()
    assert promises.broken is None
    assert [line.partition(": ")[2] for line in promises.lines] == ["the last line"]


def test_a_stopped_process_goes_on_where_it_was(scheduler: ThreadScheduler) -> None:
    """Timers that were due meanwhile fire at the thaw."""
    woke: list[float] = []
    began = scheduler.now_s
    process = VirtualProcess(scheduler, "stopped", "host")

    def main() -> None:
        scheduler.sleep(1.0)
        woke.append(scheduler.now_s - began)

    process.start(main)
    scheduler.call_later(0.5, process.freeze)
    scheduler.call_later(3.0, process.thaw)
    scheduler.run(lambda: not process.alive, 10.0)
    assert woke == [3.0]


def test_an_interrupt_is_raised_where_the_thread_may_be_interrupted(scheduler: ThreadScheduler) -> None:
    """It waits until the thread may be interrupted."""
    caught: list[float] = []
    began = scheduler.now_s
    process = VirtualProcess(scheduler, "interrupted", "host")

    def main() -> None:
        scheduler.sleep(2.0)
        thread = scheduler.current
        assert thread is not None
        thread.is_interruptible = True
        with pytest.raises(KeyError):
            scheduler.sleep(5.0)
        caught.append(scheduler.now_s - began)

    def strike() -> None:
        assert process.main is not None
        scheduler.interrupt(process.main, KeyError("now"))

    process.start(main)
    scheduler.call_later(1.0, strike)
    scheduler.run(lambda: not process.alive, 10.0)
    assert caught == [2.0]


def test_a_poller_waits_for_its_descriptors(scheduler: ThreadScheduler) -> None:
    """The wait ends when one of them is readable, or after its timeout."""
    descriptors = VirtualDescriptors(scheduler)
    number, _ = descriptors.add()
    seen: list[list[tuple[int, int]]] = []

    def main() -> None:
        poller = VirtualPoller(scheduler, descriptors)
        poller.register(number)
        seen.append(poller.poll(100))
        seen.append(poller.poll(None))

    scheduler.call_later(1.0, lambda: descriptors.eventfd_write(number, 1))
    run(scheduler, main)
    assert seen == [[], [(number, 1)]]


def test_what_waits_for_ever_is_named(scheduler: ThreadScheduler) -> None:
    """A history in which no more events are possible ends with an error that has the position of each thread."""
    with pytest.raises(SimulationStuck, match="p0, main: test_what_waits_for_ever_is_named"):
        run(scheduler, lambda: int(scheduler.park()))


def test_what_a_thread_raises_is_reported(scheduler: ThreadScheduler, errors: Errors) -> None:
    """No exception is lost."""
    process = VirtualProcess(scheduler, "failing", "host")
    failing = VirtualThread(scheduler, process, lambda: [][1], "failing")

    def main() -> None:
        failing.start()
        failing.join()

    process.start(main)
    scheduler.run(lambda: not process.alive, 1.0)
    assert [type(error) for error in errors] == [IndexError]
