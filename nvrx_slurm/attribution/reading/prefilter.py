"""Which rules can match in a text at all: Vectorscan looks for what tells of them, of all at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import hyperscan

from nvrx_slurm.attribution.catalogue import Catalogue, Rule
from nvrx_slurm.attribution.reading.relaxed import Form, relaxed, relaxed_to_literals

_KEPT_CATALOGUES = 4

_TELLING_BYTES = 12
"""A literal of so many bytes tells of its rule. Of a rule with a shorter one the whole pattern is looked for: such a
literal stands in every line of many a healthy job, and to match these one by one takes a hundred times longer."""


class Prefilter:
    """The rules that can have hits, compiled; may be shared by threads. Noise has none: it only takes them away."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.rules = tuple(rule for rule in catalogue.rules if rule.role != "noise")
        self.noise = tuple(rule for rule in catalogue.rules if rule.role == "noise")
        self.database = _compiled(self.rules) if self.rules else None
        self._patterns: dict[int, hyperscan.Database] = {}

    def pattern(self, number: int) -> hyperscan.Database:
        """A rule's own pattern, compiled when it is first wanted: that takes some milliseconds."""
        if number not in self._patterns:
            self._patterns[number] = _database([_known_form(self.rules[number])])
        return self._patterns[number]


class Searcher:
    """Searches for one thread: it has its own scratch memory. The interpreter's lock is free while one runs."""

    def __init__(self, prefilter: Prefilter) -> None:
        self.prefilter = prefilter
        self._scratch = hyperscan.Scratch(prefilter.database) if prefilter.database else None
        self._scratches: dict[int, hyperscan.Scratch] = {}

    def present(self, text: bytes) -> list[int]:
        """The numbers of the rules that may match lines of a text; a rule that is not among them matches none."""
        database = self.prefilter.database
        return sorted(_found(database, text, self._scratch)) if database else []

    def may_match(self, number: int, text: bytes) -> bool:
        """The same for one rule, by its whole pattern."""
        pattern = self.prefilter.pattern(number)
        if number not in self._scratches:
            self._scratches[number] = hyperscan.Scratch(pattern)
        return bool(_found(pattern, text, self._scratches[number]))


@functools.lru_cache(_KEPT_CATALOGUES)
def prefilter_of(catalogue: Catalogue) -> Prefilter:
    """Kept: to compile hundreds of patterns takes a while. Raises ConfigError for a rule without literals."""
    return Prefilter(catalogue)


def _found(database: hyperscan.Database, text: bytes, scratch: hyperscan.Scratch | None) -> list[int]:
    found: list[int] = []
    add = found.append
    database.scan(text, match_event_handler=lambda number, *place: add(number), scratch=scratch)
    return found


def _compiled(rules: Sequence[Rule]) -> hyperscan.Database:
    try:
        return _database([_form(rule) for rule in rules])
    except hyperscan.error:  # a pattern is too large for Vectorscan, which does not say which
        return _database([_known_form(rule) for rule in rules])


def _form(rule: Rule) -> Form:
    telling = rule.literals and min(map(len, rule.literals)) >= _TELLING_BYTES
    return relaxed_to_literals(rule) if telling else relaxed(rule)


def _known_form(rule: Rule) -> Form:
    try:
        _database([relaxed(rule)])
    except hyperscan.error:
        return relaxed_to_literals(rule)
    return relaxed(rule)


def _database(forms: Sequence[tuple[bytes, bool]]) -> hyperscan.Database:
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
