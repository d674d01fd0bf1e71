"""The rules as one Vectorscan database, which names the rules that may match in a text (the extra `vectorscan`).

Vectorscan searches for a superset: it names each rule that matches a line, and some that do not. `re` then decides.
Compiling hundreds of rules takes half a second, so the database is kept for the next process, under a digest of all
that it is made from: the rules, this module, the library and the CPU.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

import hyperscan

from nvrx_slurm.attribution.rules.catalogue import Rule
from nvrx_slurm.journal.sealed import SealedFolder

NAME = "Vectorscan"

# A rule whose literals are all this long is searched for by them. A shorter literal stands in every line of many a
# healthy log, and `re` on each of these lines takes a hundred times longer than Vectorscan on the whole pattern.
_SELECTIVE_BYTES = 12

# What Vectorscan compiles for a rule, and the flags.
Expression = tuple[bytes, int]

Form = Callable[[Sequence[Rule]], Sequence[Expression]]

# Once for each rule and text: each report takes the interpreter's lock, and that costs more than most searches.
_FLAGS = hyperscan.HS_FLAG_SINGLEMATCH | hyperscan.HS_FLAG_MULTILINE

_TOKEN = re.compile(
    rb"""(?P<begin> \^|\\A )
      | (?P<edge>   \$|\\[BbZz] )
      | (?P<set>    \[\^?\]?(?:\\.|[^\]\\])*\] )
      | (?P<repeat> \{(?:(?P<least>\d+)(?:,\d*)?|,\d*)\} )
      | \\.""",
    re.VERBOSE | re.DOTALL,
)
# Verbose patterns and NUL bytes, which Vectorscan would read as something else.
_OTHER_SYNTAX = re.compile(rb"\(\?[aLmsiu]*x|\0")

# Where `^` matches: a rule is matched against a line with and without its label (prefixes.py).
_BEGIN = (
    rb"(?:^|[\r\0]|\]:?\x20?|[0-9>]:\x20?|[)FP]:?\x20|(?:^|[\r\0])\x20\x20|\|\x20?|\+\x20"
    rb"|(?:^|[\r\0])[A-Za-z][A-Za-z0-9_.-]*:\x20"
    rb"|(?:ERROR|CRITICAL|FATAL)(?::|:[A-Za-z0-9_.]{1,120}:)?\x20*|-\x20)"
)


def search(
    rules: Sequence[Rule], forms: str, kept: SealedFolder | None
) -> Callable[[], Callable[[bytes], list[int]]]:
    """Makes searches, one for each thread, since each has scratch memory of its own. A search returns the numbers of
    the rules that may match lines of a text. It releases the interpreter's lock while it runs.

    `forms`: `selective`, `literals` or `patterns`, as the functions below. `kept`: where databases are kept from
    process to process.
    """
    form = {"selective": selective, "literals": literals, "patterns": patterns}[forms]
    name = digest_of(rules, form) if kept is not None else None
    data = kept.get(name) if kept is not None and name is not None else None
    database: hyperscan.Database | None = None
    if data is not None:
        try:
            database = hyperscan.loadb(data, hyperscan.HS_MODE_BLOCK)
            hyperscan.Scratch(database)  # refuses a database for another CPU
        except hyperscan.error:
            database = None
    if database is None:
        try:
            database = _compile(form(rules))
        except hyperscan.error:  # a pattern is too large or has syntax of `re` alone; which one is not said
            database = _compile(patterns(rules))
        if kept is not None and name is not None:
            kept.put(name, hyperscan.dumpb(database))
    return lambda: partial(_found, database, hyperscan.Scratch(database))


def _found(database: hyperscan.Database, scratch: hyperscan.Scratch, text: bytes) -> list[int]:
    found: list[int] = []
    add = found.append
    database.scan(text, match_event_handler=lambda number, *place: add(number), scratch=scratch)
    return found


def selective(rules: Sequence[Rule]) -> list[Expression]:
    """Costs least in a healthy log: a rule's literals where they are long, else its pattern."""
    return [
        _literals_of(rule) if min(map(len, rule.literals)) >= _SELECTIVE_BYTES else _pattern_of(rule)
        for rule in rules
    ]


def literals(rules: Sequence[Rule]) -> list[Expression]:
    """Costs least in a log full of errors, and finds more lines than `selective`."""
    return [_literals_of(rule) for rule in rules]


def patterns(rules: Sequence[Rule]) -> list[Expression]:
    """Each rule's pattern; its literals where Vectorscan refuses the pattern."""
    found = []
    for rule in rules:
        expression = _pattern_of(rule)
        try:
            _compile([expression])
        except hyperscan.error:
            expression = _literals_of(rule)
        found.append(expression)
    return found


def digest_of(rules: Sequence[Rule], form: Form) -> str | None:
    """The name under which the rules' database is kept. None: the source of this module cannot be read."""
    try:
        inputs = [Path(__file__).read_bytes()]
    except OSError:
        return None
    inputs += [
        f"{form.__name__} {metadata.version('hyperscan')} {sys.version} {platform.machine()}".encode(),
        str(_compile([(b"a", _FLAGS)]).info()).encode(),  # Vectorscan's version, and what it uses of this CPU
    ]
    for rule in rules:
        inputs += [rule.pattern.pattern, repr((rule.ignore_case, rule.literals)).encode()]
    digest = hashlib.sha256()
    for part in inputs:
        digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()


def _compile(expressions: Sequence[Expression]) -> hyperscan.Database:
    database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
    database.compile(
        expressions=[expression for expression, _ in expressions],
        ids=list(range(len(expressions))),
        elements=len(expressions),
        flags=[flags for _, flags in expressions],
    )
    return database


def _literals_of(rule: Rule) -> Expression:
    texts = ("".join(f"\\x{byte:02x}" for byte in literal) for literal in rule.literals)
    return "|".join(texts).encode(), _FLAGS | _caseless(rule)


def _pattern_of(rule: Rule) -> Expression:
    """The pattern for Vectorscan's prefilter mode, which approximates what Vectorscan cannot do (look-around, group
    references, atomic groups) so that it finds at least as much."""
    if _OTHER_SYNTAX.search(rule.pattern.pattern):
        return _literals_of(rule)
    expression = _TOKEN.sub(_translate, rule.pattern.pattern)
    return expression, _FLAGS | hyperscan.HS_FLAG_PREFILTER | _caseless(rule)


def _translate(token: re.Match[bytes]) -> bytes:
    kind, text = token.lastgroup, token.group()
    # Vectorscan searches a block of many lines, `re` a part of one line.
    if kind == "begin":
        return _BEGIN
    if kind == "edge":  # `re` may see one where a long line is cut
        return b""
    if kind == "set":  # in PCRE, whose syntax Vectorscan reads, `[:` opens a class by name
        return b"[" + re.sub(rb"(\\.)|\[", lambda found: found[1] or rb"\[", text[1:], flags=re.DOTALL)
    if kind == "repeat":  # without its bounds, which take seconds to compile
        return b"+" if int(token["least"] or 0) else b"*"
    return text


def _caseless(rule: Rule) -> int:
    return int(hyperscan.HS_FLAG_CASELESS) if rule.ignore_case else 0
