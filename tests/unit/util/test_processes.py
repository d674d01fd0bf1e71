"""The facts about processes."""

from __future__ import annotations

import threading

import pytest

from nvrx_slurm.util.processes import hold


def test_the_number_of_a_thread_is_no_process() -> None:
    """Thread ids and process ids are given from one sequence, so the id of an ended process may pass to a thread."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        with pytest.raises(ProcessLookupError):
            hold(thread.native_id)
    finally:
        over.set()
        thread.join()
