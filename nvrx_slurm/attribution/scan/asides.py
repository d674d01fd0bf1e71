"""Tracebacks that ended no process, or perhaps none: what stands above their header says so.

| aside | what became of the exception |
|---|---|
| `ignored` | it could be raised nowhere (in `__del__`, at exit, while a line was logged), or is told as a warning |
| `task` | it stayed in an asyncio task or callback |
| `thread` | it ended a thread |
| `process` | it ended a child process of `multiprocessing` |
| `logged` | an error was logged right above: the program may have caught it and gone on |
| `warned` | the same with a warning; or that warning has nothing to do with it |
"""

from __future__ import annotations

import re

HEADER = b"Traceback (most recent call last)"

_MOST_BETWEEN = 60
"""Lines between the header and what tells: asyncio in debug mode says where a task was made."""

_IGNORED = (
    rb"(?P<ignored>\bException ignored (?:in|on|while)\b|^--- Logging error ---|^Error in (?:atexit\._|sys\.)\w+:)"
)
_TELLS = re.compile(
    _IGNORED
    + rb"|(?P<task>\bexception was never retrieved\b|^Exception in callback\b|^[Uu]nhandled exception (?:in|during) "
    rb"|^(?:future|handle|task|asyncgen|transport|protocol): |^(?:source|handle)_traceback: )"
    rb"|(?P<thread>\bException in thread .+:$)"
    rb"|(?P<process>^Process .{1,80}:$)"
    rb"|(?P<logged>\b(?:ERROR|CRITICAL|FATAL|EXCEPTION)\b|\b[EF]\d{4} \d\d:\d\d|\[(?:error|critical|exception) *\])"
    rb"|(?P<warned>\b\w*Warning: |\bWARN(?:ING)?\b|\bW\d{4} \d\d:\d\d|\[warning *\])"
)
_TELLS_ALONE = re.compile(_IGNORED)
_ANNOUNCED = re.compile(rb"\b\w*Warning: |\bWARN(?:ING)?\b")
_MADE_HERE = re.compile(rb"(?:source|handle)_traceback: ")
_JOINT = re.compile(rb'"""$|\S*RemoteTraceback:\s*$|\S+: Caught \S+ in ')


def aside_without_traceback(above: bytes) -> str | None:
    """What the line says right above one that names an exception, where there is no traceback."""
    told = _TELLS_ALONE.search(above)
    return told and told.lastgroup


class AsideSearch:
    """Goes up from a header, which is the first line it takes. `found`: what kind of aside it is; None: none.
    `in_frames`: it goes over frames, of another traceback or of where a task was made."""

    def __init__(self) -> None:
        self.found: str | None = None
        self._taken = 0
        self.in_frames = False

    def goes_on(self, line: bytes) -> bool:
        """Take the next line up; False: what is above tells no more."""
        self._taken += 1
        if HEADER in line:
            self.in_frames = False
            self.found = "ignored" if _ANNOUNCED.search(line.partition(HEADER)[0]) else None
        elif line[:1].isspace():
            self.in_frames = True
        elif line.strip() and not _JOINT.match(line):
            told = (_MADE_HERE if self.in_frames else _TELLS).search(line.rstrip())
            self.found = told and (told.lastgroup or "task")
            return False
        return self.found is None and self._taken <= _MOST_BETWEEN
