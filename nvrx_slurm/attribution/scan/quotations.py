"""Lines that hold a failure's words and report none: a configuration that is printed, a negation, a help text.

Each rule's match is looked at in its line. The form of the line decides, never the rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_PAIR = re.compile(
    rb"""(?<![\w.-])(?P<key>['"]?[A-Za-z_][\w.-]*(?:\x20[a-z_]+){0,3}['"]?)\s*[:=]\s*
         (?P<value>False|false|None|null|[Oo]ff|[Nn]o|0(?:\.0+)?|\[\]|\{\}|''|"")
         (?=\s*(?:[,;|})\]]|$)|\s+['"]?[\w.-]+['"]?[:=])""",
    re.VERBOSE,
)
_SAYS_NO = re.compile(rb"""[:=]\s{0,8}(?:False|false|None|null|[Oo]ff|[Nn]o|0(?![0-9])|\[\]|\{\}|''|"")""")
# Keys whose 0 is the name of something.
_NUMBERED = re.compile(
    rb"(?:rank|gpu|device|node|host|worker|process|replica|id|idx|index|task|step|iteration|iter|epoch|pid|seq|code|status|port|group|stage|signal)"
    rb"['\"]?$",
    re.IGNORECASE,
)

_RAISED = re.compile(rb"(?:Error|Exception|Exit|Interrupt|Warning)$")

_NO = re.compile(rb"\b(?:no|not any|never|without(?: any)?|zero|0)[ :]+(?:[\w-]+ ){0,2}['\"`(]{0,2}$", re.IGNORECASE)
# Before a whole line in quotation marks.
_NO_TEXT = re.compile(rb"\b(?:no|without(?: any)?|zero|0) ['\"`]", re.IGNORECASE)

# What a check that passed reports: `12 Pass, 0 Fail`, `0 checks failed`, `no failed links`.
_FAILURE = re.compile(rb"\b(?:fail(?:s|ed|ures?)?|errors?|faults?|timeouts?|crash(?:es|ed)?)\b", re.IGNORECASE)
# A 0 behind a word is the number of something: `worker 0 failed`.
_COUNTED_NONE = re.compile(
    rb"(?:(?:^|(?P<before>[A-Za-z]*)['\"]?[,:;=(\[|] ?|\b(?:and|found|had|has|with) )0 (?:[a-z]+s )?"
    rb"|\b(?:no|zero) )$",
    re.IGNORECASE,
)

# What stands before the text of a line that calls itself no error.
_MILD = re.compile(
    rb"(?:[IW]\d{4} [\d:.]{8,18} "
    rb"|(?:(?!(?:Error|Exception|ERROR|CRITICAL|FATAL)\b).){0,200}?"
    rb"(?:^|[\s\[|:])(?:WARNING|INFO|DEBUG|(?<=\d )WARN|\w{0,20}Warning)\b[\]:| ])"
)

_FOUND = re.compile(
    rb"\b(?:found|seen|detected|reported|occurred|observed|recorded|so far|in the last)\b", re.IGNORECASE
)

_NEAR = 120
_OPTION = re.compile(
    rb"\s{0,8}(?:-\w(?:[ =][\w<>\[\].]+)?, ?)?--?[A-Za-z][\w-]*(?:[ =][\w<>\[\]{}|,.:]+)*(?:\s{2,}|\t)"
)
# A comment, and a command that `set -x` shows before it runs.
_SCRIPT = re.compile(rb"\s*# |\+{1,4} (?!Exception Group )[\w./'\"\[$]|\s*#SBATCH ")

_OPEN_TEXT = re.compile(rb"""[{(\[,]\s*(?P<key>['"]?[A-Za-z_][\w .-]{0,60}?['"]?)\s*[:=]\s*(?P<quote>['"])""")
_ESCAPED = re.compile(rb"\\.")
_PLAIN_VALUE = re.compile(rb"[:=]\s*(?:True|False|None|true|false|null|-?\d+(?:\.\d+)?)\s*[,})\]]")
# Keys of a log that is written as JSON, and of what libraries report: their values are what happened.
_MESSAGES = frozenset(
    rb"""msg message error err errors exception exc exc_info exc_type text log event reason cause detail details stack
    stack_trace traceback trace line body output stderr stdout payload description debug_error_string summary
    status error_message errorMessage""".split()
)

_FRAME = re.compile(rb'\s+File "[^"]+", line \d+')


def without_negated(line: bytes) -> bytes:
    """The line without keys whose value says no: `'preemption_received_at': None`, `oom_kills=0`."""

    def blank(found: re.Match[bytes]) -> bytes:
        key, value = found["key"].strip(b"'\""), found["value"]
        if _RAISED.search(key) or (value[:1] == b"0" and _NUMBERED.search(key)):
            return found[0]
        return b"\x00" * len(found[0])

    return _PAIR.sub(blank, line) if _SAYS_NO.search(line) else line


def is_quoted(line: bytes, at: int, begin: int) -> bool:
    """Whether the words at a position report no failure, by what stands around them. `begin`: where the line proper
    begins, after its labels."""
    if at <= begin:
        return False
    before, after = line[begin:at], line[at:]
    if _OPTION.match(before) or _SCRIPT.match(before):
        return True
    if _FOUND.search(after) and (_NO.search(before) or _NO_TEXT.search(before[:_NEAR])):
        return True
    return _in_a_setting(before, after)


def counts_none(line: bytes, at: int, end: int) -> bool:
    """Whether all failures that the words from `at` to `end` name are counted as none, as in `12 Pass, 0 Fail`."""
    failures = list(_FAILURE.finditer(line, at, end))
    return bool(failures) and all(
        (none := _COUNTED_NONE.search(line[max(0, failure.start() - _NEAR) : failure.start()])) is not None
        and not (none["before"] and _NUMBERED.search(none["before"]))
        for failure in failures
    )


def is_mild(line: bytes, at: int, begin: int) -> bool:
    """Whether the words at a position stand in a line that calls itself a warning or less. `begin`: where the line
    proper begins, after its labels."""
    return _MILD.match(line[begin:at]) is not None


def is_source(line: bytes, above: Iterable[bytes]) -> bool:
    """Whether a line is the text of a program that a traceback shows below a frame. `above`: the lines above, nearest
    first."""
    return line[:4].isspace() and _FRAME.match(next(iter(above), b"")) is not None


def _in_a_setting(before: bytes, after: bytes) -> bool:
    """Whether the words lie in the text of a key among others with plain values, as in a printed configuration."""
    bare = _ESCAPED.sub(b"__", before)
    is_open = any(
        opened["quote"] not in bare[opened.end() :] and opened["key"].strip(b"'\"") not in _MESSAGES
        for opened in _OPEN_TEXT.finditer(bare)
    )
    if not is_open:
        return False
    return _PLAIN_VALUE.search(before) is not None or _PLAIN_VALUE.search(after) is not None
