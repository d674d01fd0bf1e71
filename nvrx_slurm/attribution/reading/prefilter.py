"""Which rules can match in a text at all: Vectorscan looks for what tells of them, of all at once."""

from __future__ import annotations

import functools
import threading

import hyperscan

from nvrx_slurm.attribution.catalogue import Catalogue, Rule
from nvrx_slurm.attribution.reading.compiled import compiled, literals, telling, whole
from nvrx_slurm.config.site import cache_folder
from nvrx_slurm.sealed import SealedFolder

_KEPT_CATALOGUES = 4
_MOST_KEPT_FILES = 8

_one_at_a_time = threading.Lock()


class Prefilter:
    """The rules that can have hits, compiled; may be shared by threads. Noise has none: it only takes them away."""

    def __init__(self, catalogue: Catalogue, kept: SealedFolder | None = None) -> None:
        """`kept`: where compiled rules are kept from process to process."""
        self.rules = tuple(rule for rule in catalogue.rules if rule.role != "noise")
        self.noise = tuple(rule for rule in catalogue.rules if rule.role == "noise")
        self.database = compiled(self.rules, telling, kept) if self.rules else None
        self.noise_literals = compiled(self.noise, literals, None) if self.noise else None
        self._kept = kept
        self._patterns: dict[int, hyperscan.Database] = {}

    @functools.cached_property
    def literals(self) -> hyperscan.Database:
        """What tells of the rules' literals, compiled when first wanted: by a log full of errors."""
        return compiled(self.rules, literals, self._kept)

    def pattern(self, number: int) -> hyperscan.Database:
        """A rule's own pattern, compiled when it is first wanted: that takes some milliseconds."""
        if number not in self._patterns:
            self._patterns[number] = compiled([self.rules[number]], whole, None)
        return self._patterns[number]


class Searcher:
    """Searches for one thread: it has its own scratch memory. The interpreter's lock is free while one runs."""

    def __init__(self, prefilter: Prefilter) -> None:
        self.prefilter = prefilter
        self._scratch = hyperscan.Scratch(prefilter.database) if prefilter.database else None
        noise = prefilter.noise_literals
        self._noise_scratch = hyperscan.Scratch(noise) if noise else None
        self._scratches: dict[int, hyperscan.Scratch] = {}

    def present(self, text: bytes) -> list[int]:
        """The numbers of the rules that may match lines of a text; a rule that is not among them matches none."""
        database = self.prefilter.database
        return sorted(_found(database, text, self._scratch)) if database else []

    def with_literals(self, text: bytes) -> list[int]:
        """The same by literals alone: more rules, and in a text full of errors in a fraction of the time."""
        return sorted(_found(self.prefilter.literals, text, self._literals_scratch))

    def noise(self, line: bytes) -> list[Rule]:
        """The rules of noise that may match a line."""
        database, rules = self.prefilter.noise_literals, self.prefilter.noise
        return [rules[number] for number in _found(database, line, self._noise_scratch)] if database else []

    def may_match(self, number: int, text: bytes) -> bool:
        """The same for one rule, by its whole pattern."""
        pattern = self.prefilter.pattern(number)
        if number not in self._scratches:
            self._scratches[number] = hyperscan.Scratch(pattern)
        return bool(_found(pattern, text, self._scratches[number]))

    @functools.cached_property
    def _literals_scratch(self) -> hyperscan.Scratch:
        return hyperscan.Scratch(self.prefilter.literals)


def prefilter_of(catalogue: Catalogue) -> Prefilter:
    """Kept: to compile hundreds of patterns takes a while. Raises ConfigError for a rule without literals."""
    with _one_at_a_time:
        return _prefilter_of(catalogue)


@functools.lru_cache(_KEPT_CATALOGUES)
def _prefilter_of(catalogue: Catalogue) -> Prefilter:
    return Prefilter(catalogue, SealedFolder(cache_folder() / "rules", _MOST_KEPT_FILES))


def _found(database: hyperscan.Database, text: bytes, scratch: hyperscan.Scratch | None) -> list[int]:
    found: list[int] = []
    add = found.append
    database.scan(text, match_event_handler=lambda number, *place: add(number), scratch=scratch)
    return found
