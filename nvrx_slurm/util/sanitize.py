"""Text from elsewhere, made safe to show. Pure, standard library only.

Workers, node names, file names, records and Slurm's own output hold any bytes that their authors put there. A
terminal obeys an escape sequence: it can hide lines, change the window's title, write to the clipboard, or answer as
if the user had typed. A bidi control changes the order in which a line is read, a zero-width character hides that
two names differ, and XML forbids most control characters. So each of them is replaced, visibly, by the escape that
Python writes for it: `\\x1b`, `\\x9b`, `\\u202e`. Newline and tab stay.
"""

from __future__ import annotations

import codecs
import re

_CONTROL = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, DEL, C1
    r"\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # bidi, zero width, line separators
    r"\ud800-\udfff\ufffe\uffff"  # what no XML file and no UTF-8 can hold
    r"\U000e0000-\U000e0fff"  # tags: text that no terminal shows
)
# Select Graphic Rendition (ECMA-48, 8.3.117): colours. They change how text looks, and nothing else.
_SGR = r"\x1b\[[0-9;:]{0,64}m"

_unsafe = re.compile(rf"\r\n|[{_CONTROL}]")
_unsafe_in_line = re.compile(rf"(?:\r?\n)+\Z|[{_CONTROL}\n]")
_unsafe_but_colour = re.compile(rf"{_SGR}|\r\n|[{_CONTROL}]")
_unsafe_in_json = re.compile(rf"##\[|[{_CONTROL}]")
_colour = re.compile(_SGR)
_unfinished = re.compile(r"(?:\r|\x1b(?:\[[0-9;:]{0,64})?)?\Z")
_reset = re.compile(r"\x1b\[0*m")
RESET = "\x1b[0m"

# How Python keeps a byte of a file name that is no UTF-8 (PEP 383).
_BYTES_OF_SURROGATES = range(0xDC80, 0xDD00)


def shown(text: str) -> str:
    """The text, every control character in it visible. What comes back can stand in XML, too."""
    return _unsafe.sub(_visible, text)


def one_line(text: str) -> str:
    """The same, for a place that holds one line: a newline in the middle is visible, one at the end is dropped."""
    if text.isascii() and text.isprintable():  # nearly all are, and a report has 100,000
        return text
    return _unsafe_in_line.sub(_visible, text)


def uncoloured(text: str) -> str:
    """`shown`, without the colours: for a page or a report, which has its own."""
    return shown(_colour.sub("", text))


def coloured(text: str) -> str:
    """`shown`, but colours stay, for a terminal. Each line that set one ends with a reset: the next line is not its
    author's."""
    if "\x1b" not in text:
        return shown(text)
    closed = ""
    for line in _unsafe_but_colour.sub(_visible_but_colour, text).splitlines(True):
        colours = _colour.findall(line)
        body = line.rstrip("\n")
        is_open = colours and not _reset.fullmatch(colours[-1])
        closed += body + RESET + line[len(body) :] if is_open else line
    return closed


def only_colours(text: str) -> str:
    """Our own finished output: its colours pass, as they are."""
    return _unsafe_but_colour.sub(_visible_but_colour, text)


def json_text(text: str | bytes) -> str:
    """JSON with the same characters written as JSON's own escapes: the same values, safe on a terminal.

    `##[` is one of them: a runner of GitHub Actions reads it as a command anywhere in a line.
    """
    return _unsafe_in_json.sub(_json_escape, text.decode() if isinstance(text, bytes) else text)


def not_commands(text: str, *, at_line_start: bool = True) -> str:
    """Lines that a runner of GitHub Actions prints and does not obey (`::error::…` first in a line, `##[…` anywhere).

    `at_line_start`: whether the text begins a line.
    """
    parts = _COMMAND.sub(_not_a_command, text)
    return _FIRST_COMMAND.sub(_not_a_command, parts, count=1) if at_line_start else parts


def not_command_bytes(line: bytes) -> bytes:
    """The same for one line of bytes."""
    line = line.replace(b"##[", rb"#\x23[")
    return line.replace(b"::", rb"\x3a:", 1) if line.lstrip().startswith(b"::") else line


class TerminalOutput:
    """A program's output as text for a terminal, piece by piece: `coloured`, and bytes that are no UTF-8 are visible.

    A piece may end inside of a character, a colour or a line end: that part waits for the next one.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._held = ""

    def feed(self, data: bytes, *, final: bool = False) -> str:
        text = self._held + self._decoder.decode(data, final)
        cut = len(text) if final else _unfinished.search(text).start()  # type: ignore[union-attr] # it matches ""
        self._held = text[cut:]
        return coloured(text[:cut])


_COMMAND = re.compile(r"(?<=\n)(\s*)::|##\[")
_FIRST_COMMAND = re.compile(r"\A(\s*)::")


def _not_a_command(match: re.Match[str]) -> str:
    return r"#\x23[" if match[0] == "##[" else rf"{match[1]}\x3a:"


def _visible(match: re.Match[str]) -> str:
    text = match[0]
    if text.endswith("\n"):
        # The end of a line stays one (or goes, at the end of what is one line); inside of one it is visible.
        if match.re is not _unsafe_in_line:
            return "\n"
        return "" if match.end() == len(match.string) else r"\n"
    if ord(text) in _BYTES_OF_SURROGATES:
        return rf"\x{ord(text) - 0xDC00:02x}"
    return text.encode("unicode_escape").decode("ascii")


def _visible_but_colour(match: re.Match[str]) -> str:
    return match[0] if len(match[0]) > 1 and match[0] != "\r\n" else _visible(match)


def _json_escape(match: re.Match[str]) -> str:
    if match[0] == "##[":
        return r"#\u0023["
    code = ord(match[0])
    if code <= 0xFFFF:
        return rf"\u{code:04x}"
    high, low = divmod(code - 0x10000, 0x400)
    return rf"\u{0xD800 + high:04x}\u{0xDC00 + low:04x}"
