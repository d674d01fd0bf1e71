"""Joins the last line of a Python traceback with the frames above it, in a log that may have other lines between.

Some tracebacks ended no process, or perhaps none. The lines above the header show which (`Traceback.non_fatal`):

ignored    the exception could not be raised (in `__del__`, at exit, in a logging handler), or is part of a warning
task       it stayed in an asyncio task or callback
thread     it ended a thread
process    it ended a child process of `multiprocessing`
logged     an error was logged right above: the program may have caught it and gone on
warned     the same with a warning; or that warning has nothing to do with it
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

import msgspec

from nvrx_slurm.attribution.scan.blocks import LONGEST_LINE_BYTES, decoded
from nvrx_slurm.attribution.scan.model import MOST_DIGITS

HEADER = b"Traceback (most recent call last)"

# Lines between the header and what shows the kind: asyncio in debug mode prints where a task was made.
_MOST_BETWEEN = 60

_IGNORED = (
    rb"(?P<ignored>\bException ignored (?:in|on|while)\b|^--- Logging error ---|^Error in (?:atexit\._|sys\.)\w+:)"
)
_SHOWN = re.compile(
    _IGNORED
    + rb"|(?P<task>\bexception was never retrieved\b|^Exception in callback\b|^[Uu]nhandled exception (?:in|during) "
    rb"|^(?:future|handle|task|asyncgen|transport|protocol): |^(?:source|handle)_traceback: )"
    rb"|(?P<thread>\bException in thread .+:$)"
    rb"|(?P<process>^Process .{1,80}:$)"
    rb"|(?P<logged>\b(?:ERROR|CRITICAL|FATAL|EXCEPTION)\b|\b[EF]\d{4} \d\d:\d\d|\[(?:error|critical|exception) *\])"
    rb"|(?P<warned>\b\w*Warning: |\bWARN(?:ING)?\b|\bW\d{4} \d\d:\d\d|\[warning *\])"
)
_SHOWN_WITHOUT = re.compile(_IGNORED)
_ANNOUNCED = re.compile(rb"\b\w*Warning: |\bWARN(?:ING)?\b")
_MADE_HERE = re.compile(rb"(?:source|handle)_traceback: ")
_JOINT = re.compile(rb'"""$|\S*RemoteTraceback:\s*$|\S+: Caught \S+ in ')


class NonFatalSearch:
    """Goes up from a header, which is the first line it takes. `found`: the kind; None: the exception may be fatal.
    `in_frames`: it passes frames, of another traceback or of where a task was made."""

    def __init__(self) -> None:
        self.found: str | None = None
        self._taken = 0
        self.in_frames = False

    def goes_on(self, line: bytes) -> bool:
        """Take the next line up; False: the lines above do not matter."""
        self._taken += 1
        if HEADER in line:
            self.in_frames = False
            self.found = "ignored" if _ANNOUNCED.search(line.partition(HEADER)[0]) else None
        elif line[:1].isspace():
            self.in_frames = True
        elif line.strip() and not _JOINT.match(line):
            shown = (_MADE_HERE if self.in_frames else _SHOWN).search(line.rstrip())
            self.found = shown and (shown.lastgroup or "task")
            return False
        return self.found is None and self._taken <= _MOST_BETWEEN


_RAISED = re.compile(rb"[A-Za-z_][\w.<>]*(?:: |:?$)")
_NAMED = re.compile(rb"(?:(?:[A-Za-z_]\w*\.|<locals>\.)+[A-Za-z_]\w*|[A-Z]\w*)(?=: |:?$)")
_NO_NAMES = frozenset(
    b"INFO WARNING WARN ERROR DEBUG CRITICAL FATAL Killed Terminated Aborted Hangup Error Note Warning".split()
)
_ENDED_WELL = re.compile(rb"(?:SystemExit|(?:\w+\.)*exceptions\.Exit)(?:: (?:0|None))?$")
# How the UTF-8 of the frame begins that Rich draws around a traceback.
_BOX = (b"\xe2\x94", b"\xe2\x95", b"\xe2\x9d")

_SURELY_RAISED = re.compile(rb"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning)(?:: |:?$)")
_FRAME = re.compile(rb'\s*File "(?P<path>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+)|$)')
_CHAINED = (b"During handling of the above exception", b"The above exception was the direct cause")

_LINES_BACK = 1000
# How many lines of other writers may stand between two of a traceback.
_FOREIGN = 8

_FRAMES_KEPT = 12


class Traceback(msgspec.Struct, frozen=True):
    """`frames` innermost last; `stamped`: the lines that may have its time stamp, its header and the one before;
    `non_fatal`: why it may have ended no process."""

    frames: tuple[str, ...]
    stamped: tuple[bytes, ...]
    non_fatal: str | None

    def groups(self) -> dict[str, str]:
        """For `Hit.groups`."""
        found = {"frames": "|".join(self.frames), "non_fatal": self.non_fatal}
        return {name: text for name, text in found.items() if text}


def may_end(line: bytes) -> bool:
    """Whether a line looks like the last one of a traceback."""
    return _RAISED.match(line) is not None


def lines_back(text: bytes) -> Iterator[bytes]:
    """A text's lines, the last one first, of long ones the beginning; a generator, for most readers need few."""
    end = len(text)
    while end > 0:
        begin = text.rfind(b"\n", 0, end) + 1
        if begin < end:
            for line in reversed(re.split(rb"[\r\0]", text[begin:end])):
                yield line[:LONGEST_LINE_BYTES]
        end = begin - 1


def traceback_above(earlier: Iterable[bytes]) -> Traceback | None:
    """The traceback whose last line has these lines above it, nearest first, without labels; None: there is none.

    Goes up through frames to their header, and over the sentence that joins two exceptions of a chain to the frames
    of the next.
    """
    frames: list[str] = []
    stamped: list[bytes] = []
    foreign = 0
    in_frames = in_cause = False
    above: NonFatalSearch | None = None
    non_fatal: str | None = None
    for line in itertools.islice(earlier, _LINES_BACK):
        if above is not None:  # above a header: the joint of a chain, or what says that it was not fatal
            if not above.in_frames and line.startswith(_CHAINED):
                above, in_frames, in_cause = None, False, True
                continue
            if len(stamped) == 1 and line.strip():
                stamped.append(line)
            if not above.goes_on(line):
                break
        elif frame := _FRAME.match(line):
            in_frames = True
            if not in_cause:
                name, function = PurePosixPath(decoded(frame["path"])).name, decoded(frame["function"] or b"<module>")
                frames.append(f"{name}:{int(frame['line'][:MOST_DIGITS])} in {function}")
        elif HEADER in line:
            above, stamped, foreign = NonFatalSearch(), [line], 0
            if not above.goes_on(line):
                break
        elif line.strip() and not line[:1].isspace():  # a line of another writer, or of the message
            # The line right above one that names an exception, where there is no traceback.
            if not frames and not foreign and (shown_alone := _SHOWN_WITHOUT.search(line)):
                non_fatal = shown_alone.lastgroup
                break
            foreign += 1
            # Above the joint of a chain stands the message of another exception, of any form. Elsewhere a line
            # that names an exception belongs to another traceback.
            above_frames = in_cause and not in_frames
            if foreign > _FOREIGN or (not above_frames and _SURELY_RAISED.match(line)):
                break
    if above is not None:
        non_fatal = above.found
    if foreign > _FOREIGN or not (frames or non_fatal):
        return None
    return Traceback(tuple(reversed(frames[:_FRAMES_KEPT])), tuple(stamped), non_fatal)


class ExceptionSearch:
    """Goes down from a traceback's header, over its frames, to the line that names the exception, whatever its name.

    Takes the lines below the header of one writer, without labels. `found`: the last line taken is the exception's.
    """

    def __init__(self) -> None:
        self.found = False
        self._frames = self._foreign = self._taken = 0

    def goes_on(self, line: bytes) -> bool:
        """Take the next line down; False: it was found, or is not there."""
        self._taken += 1
        if line[:1].isspace() or line.startswith(_BOX):
            self._frames += 1
        elif HEADER in line:
            return False
        elif line.strip():
            named = _NAMED.match(line)
            if self._frames and named and named[0] not in _NO_NAMES:
                self.found = _ENDED_WELL.match(line.rstrip()) is None
                return False
            self._foreign += 1
        return self._foreign <= _FOREIGN and self._taken <= _LINES_BACK
