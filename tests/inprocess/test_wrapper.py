"""The arguments of a wrapper, and the function that it returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from datetime import timedelta
from typing import Any

import pytest

from nvrx_slurm import inprocess
from nvrx_slurm.inprocess.call import CallWrapper
from nvrx_slurm.inprocess.exception import NestedCallError, OptionError
from nvrx_slurm.inprocess.options import without_host
from nvrx_slurm.inprocess.store import Store
from nvrx_slurm.inprocess.wrap import inject
from tests.inprocess.harness import ROOT
from tests.inprocess.servers import Valkey

ASKED = "CallWrapper"


def test_a_call_is_given_by_annotation(valkey: Valkey) -> None:
    """A parameter annotated with CallWrapper, in any notation, gets the call, beside all other arguments."""
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    command = [sys.executable, "-m", "tests.inprocess.annotated", valkey.url]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    one = dict.fromkeys(("plain", "optional", "in_union", "with_bar", "quoted", "quoted_optional", "method"), ASKED)
    assert json.loads(done.stdout) == one | {
        "by_keyword": [1, [2, 3], ASKED, "y"],
        "between": [1, ASKED, 3],
        "without": [1, 2],
        "named": ["without", "Asks for none."],
    }


def test_an_annotation_may_exist_for_a_type_checker_only() -> None:
    """Before Python 3.14 such a module imports annotations from __future__; since then it needs no import."""
    future = "" if sys.version_info >= (3, 14) else "from __future__ import annotations\n"
    names: dict[str, Any] = {"CallWrapper": CallWrapper}
    exec(f"{future}def train(data: NDArray, call: CallWrapper, *, lr: Rate = 1): ...", names)
    call = CallWrapper.__new__(CallWrapper)
    assert inject(names["train"], ([1],), {"lr": 2}, call) == (([1], call), {"lr": 2})


def test_a_wrapper_that_is_not_enabled_does_nothing() -> None:
    """It returns the function itself, and needs no launcher."""

    def train() -> int:
        return 7

    assert inprocess.Wrapper(enabled=False)(train) is train


def test_a_call_in_a_thread_is_refused() -> None:
    """A restart can interrupt only the main thread: the error says so before any process is started."""
    errors: list[BaseException] = []

    def call() -> None:
        try:
            inprocess.Wrapper()(lambda: None)()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert isinstance(errors[0], NestedCallError)
    assert "main thread" in str(errors[0])


NESTED = """
import sys
from nvrx_slurm.inprocess import Wrapper
from nvrx_slurm.inprocess.exception import NestedCallError

wrapper, calls = Wrapper(store_kwargs={"url": sys.argv[1]}), []
inner = wrapper(lambda: None)

@wrapper
def outer():
    calls.append(inner)
    inner()

try:
    outer()
except NestedCallError as error:
    print(len(calls), error)
"""


def test_a_nested_call_is_refused_once(valkey: Valkey) -> None:
    """The nested call ends the outer call with an error that names both functions, since a restart would only nest
    again."""
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
    command = [sys.executable, "-c", NESTED, valkey.url]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout.startswith("1 <lambda> was called inside of outer"), done.stdout + done.stderr


RELATIONS = [
    ("soft_timeout", 90, "hard_timeout"),
    ("hard_timeout", 120, "barrier_timeout"),
    ("heartbeat_timeout", 130, "barrier_timeout"),
    ("heartbeat_interval", 30, "heartbeat_timeout"),
    ("monitor_process_interval", 31, "heartbeat_timeout"),
    ("monitor_thread_interval", 60, "soft_timeout"),
    ("progress_watchdog_interval", 61, "soft_timeout"),
]


@pytest.mark.parametrize(("name", "seconds", "other"), RELATIONS, ids=[name for name, *_ in RELATIONS])
def test_a_relation_that_breaks_is_named(name: str, seconds: float, other: str) -> None:
    """The error names both of two options that contradict each other, with their values."""
    with pytest.raises(OptionError, match=f"{seconds:g} s") as caught:
        inprocess.Wrapper(**{name: timedelta(seconds=seconds)})
    assert caught.value.options == (name, other)


@pytest.mark.parametrize("bounds", [{"termination_grace_time": 29}, {"hard_timeout": 118}])
def test_a_kill_that_takes_longer_than_the_barrier_is_named(bounds: dict[str, float]) -> None:
    """Otherwise the other ranks would leave the call while a rank is killed."""
    with pytest.raises(OptionError, match=r"while a rank is killed; they are 12[0-9] s and 120 s") as caught:
        inprocess.Wrapper(**{name: timedelta(seconds=seconds) for name, seconds in bounds.items()})
    assert {*bounds, "barrier_timeout"} <= {*caught.value.options}


def test_two_monitor_relations_are_named() -> None:
    """A monitor interval that is longer than the soft timeout is named together with that timeout."""
    options = {"heartbeat_timeout": 119, "monitor_process_interval": 61}
    with pytest.raises(OptionError) as caught:
        inprocess.Wrapper(**{name: timedelta(seconds=value) for name, value in options.items()})
    assert caught.value.options == ("monitor_process_interval", "soft_timeout")


WRONG: list[tuple[str, Any, str]] = [
    ("soft_timeout", 60, "timedelta"),
    ("soft_timeout", timedelta(0), "more than 0"),
    ("last_call_wait", timedelta(seconds=-1), "0 or more"),
    ("store_factory", dict, "RedisStore, FileStore"),
    ("initialize", print, "Initialize or None"),
    ("rank_assignment", print, "RankAssignment"),
    ("monitor_process_logfile", "monitor.log", "absolute path"),
    ("store_kwargs", {"lock": threading.Lock()}, "picklable"),
    ("store_kwargs", {"prot": 29502}, "'prot'; RedisStore takes url, password_file, patience"),
    ("store_kwargs", {"patience": 5}, "timedelta of more than 0, not 5"),
    ("store_kwargs", {"patience": timedelta(0)}, "timedelta of more than 0"),
    ("store_kwargs", {"url": "http://host"}, "redis://host:6379/0"),
    ("store_kwargs", {"url": 6379}, "redis://host:6379/0"),
    ("store_kwargs", {"password_file": "secret"}, "without url"),
    ("enabled", "yes", "bool"),
]


@pytest.mark.parametrize(("name", "value", "valid"), WRONG, ids=[f"{name} {valid}" for name, _, valid in WRONG])
def test_a_wrong_option_is_named(name: str, value: Any, valid: str) -> None:
    """The error names the option, and what is valid."""
    with pytest.raises(OptionError, match=valid) as caught:
        inprocess.Wrapper(**{name: value})
    assert caught.value.options == (name,)


@pytest.mark.parametrize(
    ("store", "given", "valid"),
    [
        (inprocess.FileStore, {"path": "groups"}, "must be absolute"),
        (inprocess.FileStore, {"path": None}, "path of a folder"),
        (inprocess.TCPStore, {"host_name": "h"}, "give both"),
        (inprocess.TCPStore, {"host_name": "h", "port": "29500"}, "1 to 65535, not '29500'"),
    ],
)
def test_a_wrong_argument_of_a_store_is_named(store: type[Store], given: Any, valid: str) -> None:
    """The error comes when the wrapper is made, as for its own options, and not when the function is called."""
    with pytest.raises(OptionError, match=valid) as caught:
        inprocess.Wrapper(store_factory=store, store_kwargs=given)
    assert caught.value.options == ("store_kwargs",)


class _AnyStore(Store):
    def __init__(self, **any_of_them: Any) -> None: ...


@pytest.mark.parametrize(
    ("store", "given", "kept"),
    [
        (inprocess.RedisStore, {"port": 29502, "timeout": timedelta(minutes=5), "url": "redis://h:1"}, {"url"}),
        (inprocess.RedisStore, {"host_name": "h", "port": 1, "prot": 2}, {"prot"}),
        (inprocess.TCPStore, {"port": 29502, "use_libuv": True}, set()),
        (inprocess.TCPStore, {"host_name": "h", "port": 1, "multi_tenant": True}, {"host_name", "port"}),
        (_AnyStore, {"port": 29502}, {"port"}),
    ],
)
def test_arguments_of_a_store_that_rank_0_hosts_are_left_out(store: type[Store], given: Any, kept: set[str]) -> None:
    """Arguments for the address of nvidia_resiliency_ext's store are ignored; a store's own arguments, and mistyped
    ones, are kept."""
    left, ignored = without_host(store, given)
    assert (set(left), ignored) == (kept, set(given) - kept)
