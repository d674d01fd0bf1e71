"""Which rules can match in a text at all: one search for all of them at once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

from nvrx_slurm.attribution.rules.catalogue import Catalogue, Rule
from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec.site import cache_folder
from nvrx_slurm.journal.sealed import SealedFolder
from nvrx_slurm.util.log import get_logger

log = get_logger("attribution")

_KEPT_CATALOGUES = 4
_MOST_KEPT_FILES = 8

# `lru_cache` alone would let two threads compile the same rules at once, which takes half a second each.
_one_at_a_time = threading.Lock()

Search = Callable[[bytes], list[int]]


# `vectorscan.search`, or `search_in_python`; the former says what it takes.
SearchFactory = Callable[[Sequence[Rule], str, SealedFolder | None], Callable[[], Search]]


@functools.cache
def search_factory() -> SearchFactory:
    """Vectorscan's where it is installed and runs on this CPU, else Python's."""
    try:
        from nvrx_slurm.attribution.scan.vectorscan import search
    except ImportError:
        log.warning(
            "rules are searched for by Python, slowly: Vectorscan is not installed;"
            " pip install 'nvrx-slurm[vectorscan]'"
        )
        return search_in_python
    log.info("rules are searched for by Vectorscan")
    return search


def search_in_python(rules: Sequence[Rule], forms: str, kept: SealedFolder | None) -> Callable[[], Search]:
    """As `vectorscan.search`, by the rules' literals, one after the other, at some megabytes a second.

    It names every rule that Vectorscan names, and more. `re` decides what matches in either case, so the verdict is
    the same. Nothing is compiled or kept.
    """
    exact = [(number, rule.literals) for number, rule in enumerate(rules) if not rule.ignore_case]
    caseless = [(number, rule.literals) for number, rule in enumerate(rules) if rule.ignore_case]

    def found(text: bytes) -> list[int]:
        present = [number for number, literals in exact if any(literal in text for literal in literals)]
        if caseless:
            lower = text.lower()
            present += [number for number, literals in caseless if any(literal in lower for literal in literals)]
        return present

    return lambda: found


class Prefilter:
    """The rules that can have hits, compiled; may be shared by threads. Noise has none: it only takes them away."""

    def __init__(
        self, catalogue: Catalogue, kept: SealedFolder | None = None, search: SearchFactory | None = None
    ) -> None:
        """`kept`: where compiled rules are kept from process to process. Raises ConfigError for a rule without
        literals."""
        for rule in catalogue.rules:
            if not rule.literals or not all(rule.literals):
                raise ConfigError(f"rule {rule.name} has no literals, so that no search can find it", key=rule.name)
        self.rules = tuple(rule for rule in catalogue.rules if rule.role != "noise")
        self.noise = tuple(rule for rule in catalogue.rules if rule.role == "noise")
        self._search, self._kept = search or search_factory(), kept
        self.selective = self._search(self.rules, "selective", kept) if self.rules else None
        self.noise_literals = self._search(self.noise, "literals", None) if self.noise else None
        self._patterns: dict[int, Callable[[], Search]] = {}

    @functools.cached_property
    def literals(self) -> Callable[[], Search]:
        """A search for all rules' literals, compiled when a log full of errors first needs it."""
        return self._search(self.rules, "literals", self._kept)

    def pattern(self, number: int) -> Callable[[], Search]:
        """A search for one rule's pattern, compiled on first use: that takes some milliseconds."""
        if number not in self._patterns:
            self._patterns[number] = self._search([self.rules[number]], "patterns", None)
        return self._patterns[number]


class Searcher:
    """Searches for one thread."""

    def __init__(self, prefilter: Prefilter) -> None:
        self.prefilter = prefilter
        self._selective = prefilter.selective() if prefilter.selective else None
        self._noise = prefilter.noise_literals() if prefilter.noise_literals else None
        self._patterns: dict[int, Search] = {}

    def present(self, text: bytes) -> list[int]:
        """The numbers of the rules that may match lines of a text; a rule that is not among them matches none."""
        return sorted(self._selective(text)) if self._selective else []

    def with_literals(self, text: bytes) -> list[int]:
        """The same by literals alone: more rules, and in a text full of errors in a fraction of the time."""
        return sorted(self._literals(text))

    def noise(self, line: bytes) -> list[Rule]:
        """The rules of noise that may match a line."""
        return [self.prefilter.noise[number] for number in self._noise(line)] if self._noise else []

    def may_match(self, number: int, text: bytes) -> bool:
        """Whether one rule may match lines of a text, by its whole pattern."""
        if number not in self._patterns:
            self._patterns[number] = self.prefilter.pattern(number)()
        return bool(self._patterns[number](text))

    @functools.cached_property
    def _literals(self) -> Search:
        return self.prefilter.literals()


def prefilter_of(catalogue: Catalogue) -> Prefilter:
    """The catalogue's, compiled once in a process. Raises ConfigError for a rule without literals."""
    with _one_at_a_time:
        return _prefilter_of(catalogue)


@functools.lru_cache(_KEPT_CATALOGUES)
def _prefilter_of(catalogue: Catalogue) -> Prefilter:
    return Prefilter(catalogue, SealedFolder(cache_folder() / "rules", _MOST_KEPT_FILES))
