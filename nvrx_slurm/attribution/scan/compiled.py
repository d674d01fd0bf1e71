"""Rules compiled for Vectorscan, and kept for the next process: to compile hundreds takes a second, to load them none
of it.

What is kept is named by all that it is made of: the rules, the code that makes it, the library and the CPU.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

import hyperscan

from nvrx_slurm.attribution.catalogue import Rule
from nvrx_slurm.attribution.scan import relaxed as relaxing
from nvrx_slurm.attribution.scan.relaxed import Form, relaxed, relaxed_to_literals
from nvrx_slurm.journal.sealed import SealedFolder

_TELLING_BYTES = 12
"""A literal of so many bytes tells of its rule. Of a rule with a shorter one the whole pattern is looked for: such a
literal stands in every line of many a healthy job, and to match these one by one takes a hundred times longer."""


NAME = "Vectorscan"

Forms = Callable[[Sequence[Rule]], Sequence[Form]]
"""What is searched for."""


def search(
    rules: Sequence[Rule], forms: str, kept: SealedFolder | None
) -> Callable[[], Callable[[bytes], list[int]]]:
    """Makes searches, one for each thread, since each has scratch memory of its own. A search gives the numbers of
    the rules that may match lines of a text. The interpreter's lock is free while it runs.

    `forms`: `telling`, `literals` or `whole`, as the functions below. `kept`: where compiled rules are kept from
    process to process. Raises ConfigError for a rule without literals.
    """
    database = compiled(rules, {"telling": telling, "literals": literals, "whole": whole}[forms], kept)
    return lambda: partial(_found, database, hyperscan.Scratch(database))


def _found(database: hyperscan.Database, scratch: hyperscan.Scratch, text: bytes) -> list[int]:
    found: list[int] = []
    add = found.append
    database.scan(text, match_event_handler=lambda number, *place: add(number), scratch=scratch)
    return found


def compiled(rules: Sequence[Rule], forms: Forms, kept: SealedFolder | None) -> hyperscan.Database:
    """What tells of each rule once in a text, by its place in `rules`, of which there is one at least.

    Raises ConfigError for a rule without literals.
    """
    name = name_of(rules, forms) if kept is not None else None
    if kept is None or name is None:
        return _made(rules, forms)
    if (body := kept.get(name)) is not None and (database := _loaded(body)) is not None:
        return database
    database = _made(rules, forms)
    kept.put(name, hyperscan.dumpb(database))
    return database


def telling(rules: Sequence[Rule]) -> list[Form]:
    """What costs least in a healthy log: of rules with telling literals these, of others the whole pattern."""
    return [_form(rule) for rule in rules]


def literals(rules: Sequence[Rule]) -> list[Form]:
    """What costs least in a log full of errors, and finds more than `telling` does."""
    return [relaxed_to_literals(rule) for rule in rules]


def whole(rules: Sequence[Rule]) -> list[Form]:
    """The whole patterns, as far as Vectorscan takes them."""
    return [_known_form(rule) for rule in rules]


def name_of(rules: Sequence[Rule], forms: Forms) -> str | None:
    """Under which it is kept. None: the code that makes it lies where it cannot be read."""
    digest = hashlib.sha256()
    try:
        for part in _parts(rules, forms):
            digest.update(b"%d:" % len(part) + part)
    except OSError:
        return None
    return digest.hexdigest()


def _parts(rules: Sequence[Rule], forms: Forms) -> Iterator[bytes]:
    yield from (Path(code).read_bytes() for code in (__file__, relaxing.__file__))
    yield f"{forms.__name__} {metadata.version('hyperscan')} {sys.version} {platform.machine()}".encode()
    yield str(_database([(b"a", False)]).info()).encode()  # Vectorscan's version, and what it uses of this CPU
    for rule in rules:
        yield rule.pattern.pattern
        yield repr((rule.ignore_case, rule.literals)).encode()


def _loaded(body: bytes) -> hyperscan.Database | None:
    try:
        database = hyperscan.loadb(body, hyperscan.HS_MODE_BLOCK)
        hyperscan.Scratch(database)  # which it refuses for another CPU's
    except hyperscan.error:
        return None
    return database


def _made(rules: Sequence[Rule], forms: Forms) -> hyperscan.Database:
    try:
        return _database(forms(rules))
    except hyperscan.error:  # a pattern is too large for Vectorscan, which does not say which
        return _database(whole(rules))


def _form(rule: Rule) -> Form:
    tells = rule.literals and min(map(len, rule.literals)) >= _TELLING_BYTES
    return relaxed_to_literals(rule) if tells else relaxed(rule)


def _known_form(rule: Rule) -> Form:
    try:
        _database([relaxed(rule)])
    except hyperscan.error:
        return relaxed_to_literals(rule)
    return relaxed(rule)


def _database(forms: Sequence[Form]) -> hyperscan.Database:
    """Tells of each form once in a text: each report takes the interpreter's lock, dearer than a whole search."""
    flags = hyperscan.HS_FLAG_SINGLEMATCH | hyperscan.HS_FLAG_MULTILINE
    database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
    database.compile(
        expressions=[expression for expression, _ in forms],
        ids=list(range(len(forms))),
        elements=len(forms),
        flags=[flags | (hyperscan.HS_FLAG_CASELESS if caseless else 0) for _, caseless in forms],
    )
    return database
