"""What a wrapper takes, and what it makes of a function."""

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
from nvrx_slurm.inprocess.exception import NestedCallError, OptionError
from tests.inprocess.harness import ROOT
from tests.inprocess.servers import Valkey

ASKED = "CallWrapper"


def test_a_call_is_given_by_annotation(valkey: Valkey) -> None:
    """A parameter annotated with CallWrapper gets the call, however that is written, beside all other arguments."""
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


def test_a_wrapper_that_is_not_enabled_does_nothing() -> None:
    """The function itself comes back, and needs no launcher."""

    def train() -> int:
        return 7

    assert inprocess.Wrapper(enabled=False)(train) is train


def test_a_call_in_a_thread_is_refused() -> None:
    """A restart can only strike the main thread: the error says so before anything is started."""
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
    """It ends the outer call with an error that names both functions: to restart would only nest again."""
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
    command = [sys.executable, "-c", NESTED, valkey.url]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout.startswith("1 <lambda> was called inside of outer"), done.stdout + done.stderr


RELATIONS = [
    ("soft_timeout", 90, "soft_timeout must be shorter than hard_timeout"),
    ("hard_timeout", 120, "hard_timeout must be shorter than barrier_timeout"),
    ("heartbeat_timeout", 130, "heartbeat_timeout must be shorter than barrier_timeout"),
    ("heartbeat_interval", 30, "heartbeat_interval must be shorter than heartbeat_timeout"),
    ("monitor_process_interval", 31, "monitor_process_interval must be shorter than heartbeat_timeout"),
    ("monitor_thread_interval", 60, "monitor_thread_interval must be shorter than soft_timeout"),
    ("progress_watchdog_interval", 61, "progress_watchdog_interval must be shorter than soft_timeout"),
]


@pytest.mark.parametrize(("name", "seconds", "said"), RELATIONS, ids=[name for name, *_ in RELATIONS])
def test_a_relation_that_breaks_is_named(name: str, seconds: float, said: str) -> None:
    """Two options that contradict each other are both named, with what they are."""
    with pytest.raises(OptionError, match=said) as caught:
        inprocess.Wrapper(**{name: timedelta(seconds=seconds)})
    assert f"{seconds:g} s" in str(caught.value)


def test_two_monitor_relations_are_named() -> None:
    """A monitor that looks less often than a rank may be silent is named beside that timeout."""
    options = {"heartbeat_timeout": 119, "monitor_process_interval": 61}
    with pytest.raises(OptionError, match="monitor_process_interval must be shorter than soft_timeout"):
        inprocess.Wrapper(**{name: timedelta(seconds=value) for name, value in options.items()})


WRONG: list[tuple[str, Any, str]] = [
    ("soft_timeout", 60, "soft_timeout must be of type timedelta"),
    ("soft_timeout", timedelta(0), "soft_timeout must be more than 0"),
    ("last_call_wait", timedelta(seconds=-1), "last_call_wait must be 0 or more"),
    ("store_factory", dict, "store_factory must be a class of stores"),
    ("initialize", print, "initialize must be of type Initialize or None"),
    ("rank_assignment", print, "rank_assignment must be of type RankAssignment"),
    ("monitor_process_logfile", "monitor.log", "monitor_process_logfile must be an absolute path"),
    ("store_kwargs", {"lock": threading.Lock()}, "store_kwargs must be picklable"),
    (
        "store_kwargs",
        {"port": 29502},
        "unexpected keyword argument 'port'; RedisStore takes url, password_file, patience",
    ),
    ("enabled", "yes", "enabled must be of type bool"),
]


@pytest.mark.parametrize(("name", "value", "said"), WRONG, ids=[said for *_, said in WRONG])
def test_a_wrong_option_is_named(name: str, value: Any, said: str) -> None:
    """The error names the option, and what is valid."""
    with pytest.raises(OptionError, match=said):
        inprocess.Wrapper(**{name: value})
