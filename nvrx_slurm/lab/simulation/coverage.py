"""What the product's decision-making code has executed in this process: lines and branches, by `sys.monitoring`.

Each line is reported once, and each branch until both of its ways were taken: after some hundred runs hardly an event
is left, and the runs are as fast as without. Python 3.11 has no `sys.monitoring`: nothing is measured there.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

PACKAGES = ("nvrx_slurm.core", "nvrx_slurm.controller", "nvrx_slurm.agent")
TOOL = 4
"""Of the six ids of tools: the one that no debugger, profiler or coverage tool takes by convention."""

_monitoring: Any = getattr(sys, "monitoring", None)
IS_THERE = _monitoring is not None


class Coverage:
    """Places of `PACKAGES`: `core/job.py:120`, or `core/job.py:120 3>7` for one way of a branch. One a process."""

    def __init__(self) -> None:
        self.lines: set[str] = set()  # all that there are
        self._new: list[str] = []
        self._ways: dict[tuple[CodeType, int], int] = {}
        events = _monitoring.events
        _monitoring.use_tool_id(TOOL, "nvrx-slurm simulation")
        _monitoring.register_callback(TOOL, events.LINE, self._line)
        _monitoring.register_callback(TOOL, events.BRANCH, self._branch)
        for code in _codes():
            self.lines.update(f"{_path(code)}:{line}" for _, _, line in code.co_lines() if line)
            _monitoring.set_local_events(TOOL, code, events.LINE | events.BRANCH)

    def take_new(self) -> list[str]:
        """The places reached for the first time since the last call."""
        new, self._new = self._new, []
        return new

    def close(self) -> None:
        _monitoring.free_tool_id(TOOL)

    def _line(self, code: CodeType, line: int) -> Any:
        self._new.append(f"{_path(code)}:{line}")
        return _monitoring.DISABLE

    def _branch(self, code: CodeType, at: int, to: int) -> Any:
        before = self._ways.get((code, at))
        if before == to:
            return None
        self._ways[code, at] = to
        line = next((line for begin, end, line in code.co_lines() if begin <= at < end), None)
        self._new.append(f"{_path(code)}:{line} {at}>{to}")
        return None if before is None else _monitoring.DISABLE


def _path(code: CodeType) -> str:
    return code.co_filename.rpartition("nvrx_slurm/")[2]


def _codes() -> Iterator[CodeType]:
    """Of every function of the packages, those inside others included."""
    for package in PACKAGES:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    found = [
        each.__code__
        for each in gc.get_objects()
        if isinstance(each, FunctionType) and str(each.__module__).startswith(PACKAGES)
    ]
    seen: set[CodeType] = set()
    while found:
        code = found.pop()
        if code not in seen and "nvrx_slurm/" in code.co_filename:
            seen.add(code)
            yield code
            found += [each for each in code.co_consts if isinstance(each, CodeType)]
