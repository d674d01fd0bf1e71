"""The resources of a process, to be compared before and after a call."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from dataclasses import dataclass, fields
from pathlib import Path

from tests.inprocess.actions import children


@dataclass(frozen=True)
class Belongings:
    """Each resource as a set of texts."""

    threads: frozenset[str]
    files: frozenset[str]
    children: frozenset[str]
    environment: frozenset[str]
    signals: frozenset[str]
    log_handlers: frozenset[str]
    hooks: frozenset[str]

    @classmethod
    def of_this_process(cls) -> Belongings:
        return cls(
            threads=frozenset(f"{thread.name} ({thread.ident})" for thread in threading.enumerate()),
            files=frozenset(_open_files()),
            children=frozenset(str(pid) for pid in children(os.getpid())),
            environment=frozenset(f"{name}={value}" for name, value in os.environ.items()),
            signals=frozenset(_signals()),
            log_handlers=frozenset(_log_handlers()),
            hooks=frozenset(f"{hook}" for hook in (sys.excepthook, sys.unraisablehook, threading.excepthook)),
        )

    def beyond(self, before: Belongings) -> dict[str, list[str]]:
        """The differences to `before`, in both directions; empty if there are none."""
        changed = {
            field.name: sorted(getattr(self, field.name) ^ getattr(before, field.name)) for field in fields(self)
        }
        return {name: what for name, what in changed.items() if what}


def _open_files() -> list[str]:
    files = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            files.append(f"{entry.name}: {entry.readlink()}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return files


def _signals() -> list[str]:
    handlers = [f"{number}: {signal.getsignal(number)}" for number in signal.valid_signals()]
    blocked = [f"{number} blocked" for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    return handlers + blocked + [f"wakeup fd {_wakeup_fd()}"]


def _wakeup_fd() -> int:
    number = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(number)
    return number


def _log_handlers() -> list[str]:
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    return [f"{logger.name}: {handler}" for logger in loggers for handler in logger.handlers]
