"""How a monitor starts, and what is left if its start fails."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from nvrx_slurm.inprocess.exception import InternalError, OptionError
from nvrx_slurm.inprocess.monitor import MonitorOptions, MonitorProcess
from nvrx_slurm.inprocess.progress import ProgressStamps
from nvrx_slurm.inprocess.store_redis import RedisStore
from nvrx_slurm.lab.devcluster.lifecycle import free_ports

WAIT_S = 30.0
SECRET = "not-for-others"

Begin = Callable[..., MonitorProcess]


class Here(RedisStore):
    """A store whose class has a wrong module name."""


@pytest.fixture
def unreachable() -> dict[str, Any]:
    """The address of a store that does not answer."""
    return {"url": f"redis://127.0.0.1:{free_ports(1)[0]}", "patience": timedelta(seconds=0.05)}


@pytest.fixture
def begin(unreachable: dict[str, Any]) -> Iterator[Begin]:
    """Starts a monitor of this process; it never becomes ready. No child and no descriptor is left after the test."""
    before, stamps = descriptors(), ProgressStamps.create()
    monitors: list[MonitorProcess] = []

    def start(**options: Any) -> MonitorProcess:
        bounds = {"soft_timeout_s": 60.0, "hard_timeout_s": 90.0, "heartbeat_timeout_s": 30.0}
        bounds |= {"heartbeat_interval_s": 1.0, "interval_s": 1.0, "grace_s": 5.0}
        given = {"store_factory": RedisStore, "store_kwargs": unreachable, "group": SECRET} | bounds | options
        monitors.append(MonitorProcess(MonitorOptions(call=0, member=0, members=1, rank=0, **given), stamps))
        return monitors[-1]

    yield start
    for monitor in monitors:
        monitor.leave()
        assert not Path(f"/proc/{monitor.pid}").exists()
    stamps.close()
    assert descriptors() == before


def descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208  names only


def test_store_that_does_not_answer_is_reported(begin: Begin):
    """The rank gets the monitor's error message."""
    with pytest.raises(
        InternalError, match=r"could not begin: StoreError: the store at redis://127.* does not answer"
    ):
        begin().wait_ready(WAIT_S)


def test_log_file_that_cannot_be_written_is_reported(begin: Begin, tmp_path: Path):
    """The error is raised before the function is called, not when a line is lost."""
    with pytest.raises(InternalError, match=r"could not begin: FileNotFoundError.*nowhere"):
        begin(logfile=str(tmp_path / "nowhere" / "{rank}.log")).wait_ready(WAIT_S)


def test_store_of_a_module_that_is_nowhere_is_reported(begin: Begin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The module may have been importable when the rank started."""
    source = tmp_path / "store_gone.py"
    source.write_text("from nvrx_slurm.inprocess.store_redis import RedisStore\nclass Store(RedisStore): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    factory = importlib.import_module("store_gone").Store
    with pytest.raises(InternalError, match="StoreError"):
        begin(store_factory=factory).wait_ready(WAIT_S)
    source.unlink()
    with pytest.raises(InternalError, match="could not begin: ModuleNotFoundError: No module named 'store_gone'"):
        begin(store_factory=factory).wait_ready(WAIT_S)


@pytest.mark.parametrize("module", ["__main__", "__mp_main__"])
def test_what_only_the_script_defines_is_refused(begin: Begin, monkeypatch: pytest.MonkeyPatch, module: str):
    """Another process cannot import it; the message says where to put it."""
    monkeypatch.setattr(Here, "__module__", module)
    with pytest.raises(OptionError, match=r"^Here is defined in the script itself.*a module has"):
        begin(store_factory=Here)
    with pytest.raises(OptionError, match=r"^Here is defined"):
        begin(store_kwargs={"url": Here})


def test_options_are_hidden_from_other_processes(begin: Begin):
    """They may have a password: neither argv nor the environment shows them."""
    monitor = begin()
    for place in ("cmdline", "environ"):
        assert SECRET.encode() not in Path(f"/proc/{monitor.pid}/{place}").read_bytes()


def test_start_that_takes_too_long_is_given_up(begin: Begin):
    """The cause does not matter, and no process of it is left."""
    monitor = begin()
    os.kill(monitor.pid, signal.SIGSTOP)
    with pytest.raises(InternalError, match=r"not ready within 0.1 s"):
        monitor.wait_ready(0.1)
    assert not Path(f"/proc/{monitor.pid}").exists()


def test_monitor_that_is_killed_at_its_start_is_reported(begin: Begin):
    """The rank is not killed in this case."""
    monitor = begin()
    os.kill(monitor.pid, signal.SIGKILL)
    with pytest.raises(InternalError, match="it ended with code -9"):
        monitor.wait_ready(WAIT_S)


def test_leaving_before_it_is_ready(begin: Begin):
    """A call that fails early does not wait for the monitor; the fixture checks what is left."""
    begin().leave()


def test_signals_are_as_they_were(begin: Begin):
    """The start of the monitor blocks signals, and leaves this thread's mask as it was."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    begin()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
