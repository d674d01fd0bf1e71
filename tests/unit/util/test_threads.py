"""Threads for blocking work, with and without a pool."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from nvrx_slurm.util.threads import SignalSafeEvent, ThreadPool, in_thread

BOUND_S = 20.0


def test_the_future_has_the_result_or_the_exception() -> None:
    """This holds for a new thread and for a thread of a pool."""
    pool = ThreadPool("test")
    for start in (pool.start, lambda work: in_thread(work, "test")):
        assert start(lambda: 7).result(BOUND_S) == 7
        with pytest.raises(ZeroDivisionError):
            start(lambda: 1 // 0).result(BOUND_S)
    pool.close()


def test_a_thread_that_cannot_be_started_is_an_error_of_its_work() -> None:
    """The process may have too little memory or too many threads: here its address space is limited."""
    tries = (
        "import resource, threading\n"
        "from nvrx_slurm.util.threads import in_thread\n"
        "threading.stack_size(1 << 30)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))\n"
        "print(repr(in_thread(int, 'test').exception(20.0)))\n"
    )
    said = subprocess.run([sys.executable, "-c", tries], capture_output=True, text=True, check=True).stdout
    assert said.startswith("BlockingIOError(11"), said


def test_a_pool_has_as_many_threads_as_were_busy_at_once() -> None:
    """All work starts at once; later work uses the same threads."""
    pool, meeting = ThreadPool("test"), threading.Barrier(4)

    def meet() -> int:
        meeting.wait(BOUND_S)  # passes only when four threads wait
        return threading.get_ident()

    first = {future.result(BOUND_S) for future in [pool.start(meet) for _ in range(4)]}
    assert len(first) == 4
    later = {pool.start(threading.get_ident).result(BOUND_S) for _ in range(20)}
    assert len(later - first) <= 1  # one may be started while another still stores its result
    pool.close()


def test_a_closed_pool_leaves_no_thread() -> None:
    """Idle threads end at once, a busy thread after its work."""
    pool, go, ended = ThreadPool("to be closed"), threading.Event(), []
    pool.start(lambda: None).result(BOUND_S)
    busy = pool.start(lambda: ended.append(go.wait(BOUND_S)))
    own = [thread for thread in threading.enumerate() if thread.name == "to be closed"]
    pool.close()
    go.set()
    busy.result(BOUND_S)
    assert own
    for thread in own:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    assert ended == [True]


def test_a_forked_child_has_a_pool_of_its_own() -> None:
    """The child does not have the parent's idle threads: it starts its own, and does not wait for the parent's."""
    pool = ThreadPool("test")
    pool.start(lambda: None).result(BOUND_S)
    if (child := os.fork()) == 0:
        os._exit(pool.start(lambda: 7).result(BOUND_S))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    pool.close()


def test_an_event_wakes_all_who_wait_for_it() -> None:
    """All waiting threads wake up, and a later one does not wait; a wait that times out returns False."""
    event, pool = SignalSafeEvent(), ThreadPool("waiting")
    assert not event.wait(0.0)
    waiting = [pool.start(event.wait) for _ in range(4)]
    event.set()
    event.set()
    assert all(each.result(BOUND_S) for each in waiting)
    assert event.wait(0.0)
    pool.close()
