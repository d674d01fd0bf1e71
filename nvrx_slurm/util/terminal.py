"""The last look at what a command prints: only text and colours leave the process.

A view makes what it shows visible field by field (`sanitize.one_line`), since it alone knows where a field ends. This
guard stands behind all of them, at standard output and standard error. What must reach a terminal as it is (the live
screen's own cursor movements, workflow commands for GitHub) is written to `as_is`.
"""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
from typing import IO, Any, TextIO, cast

from nvrx_slurm.util.sanitize import not_commands, only_colours


class GuardedStream(io.TextIOWrapper):
    """A text stream over the same bytes as `stream`. `in_actions`: a runner of GitHub Actions reads them."""

    def __init__(self, stream: TextIO, *, in_actions: bool) -> None:
        super().__init__(
            stream.buffer,
            # In an ASCII locale every other character would become an escape, and terminals read UTF-8 there too.
            encoding="utf-8" if codecs.lookup(stream.encoding).name == "ascii" else stream.encoding,
            errors="backslashreplace",
            line_buffering=getattr(stream, "line_buffering", True),
            write_through=getattr(stream, "write_through", False),
        )
        self._in_actions, self._at_line_start = in_actions, True
        self.as_is: TextIO = cast(TextIO, _AsIs(self))

    def write(self, text: str) -> int:
        safe = only_colours(text)
        if self._in_actions:
            safe = not_commands(safe, at_line_start=self._at_line_start)
            self._at_line_start = safe.endswith("\n") or (self._at_line_start and not safe.strip())
        super().write(safe)
        return len(text)

    def write_as_is(self, text: str) -> int:
        return super().write(text)


class _AsIs:
    """The same stream, without the guard."""

    def __init__(self, stream: GuardedStream) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write_as_is(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_missing() -> None:
    """Open /dev/null in place of each standard stream that this process was started without (`>&-`, some daemons)."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            # Else the next file that is opened gets this number, and what a child prints is written into that file.
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, descriptor)  # children inherit it; of an equal number nothing is copied
            if null != descriptor:
                os.close(null)
            os.set_inheritable(descriptor, True)
            stream = open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 open to the end
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)  # keeps it open: `guard` goes on with its buffer alone


def guard(*, in_actions: bool) -> None:
    """Put the guard before this process's standard output and error."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, GuardedStream):
            setattr(sys, name, GuardedStream(stream, in_actions=in_actions))


def as_is(stream: IO[str]) -> TextIO:
    """The stream behind the guard."""
    return stream.as_is if isinstance(stream, GuardedStream) else cast(TextIO, stream)


def is_unread(stream: IO[str]) -> bool:
    """Whether nothing can read the stream any more: its terminal is closed, or the reader of its pipe has gone."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # closed, or it has no descriptor
        return False
    polled = select.poll()
    polled.register(descriptor, 0)  # POLLERR and POLLHUP are reported unasked
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in polled.poll(0))


def drop_output() -> None:
    """From now on what is printed on standard output goes nowhere, also what Python writes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_exactly(text: str) -> None:
    """A document that another program reads (a script, a file's text): to the byte, except on a terminal."""
    if sys.stdout.isatty():
        sys.stdout.write(text)
    else:
        as_is(sys.stdout).write(text)
    sys.stdout.flush()
