"""Which rules can match in a text at all: one search for what tells of them, of all at once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from nvrx_slurm.attribution.catalogue import Catalogue, Rule
from nvrx_slurm.jobspec.site import cache_folder
from nvrx_slurm.journal.sealed import SealedFolder
from nvrx_slurm.util.log import get_logger

log = get_logger("attribution")

_KEPT_CATALOGUES = 4
_MOST_KEPT_FILES = 8

_one_at_a_time = threading.Lock()

Search = Callable[[bytes], list[int]]


class Engine(Protocol):
    """`compiled` (Vectorscan) or `literal_search` (Python): modules that search for rules. `NAME`: for the log."""

    NAME: str

    def search(self, rules: Sequence[Rule], forms: str, kept: SealedFolder | None) -> Callable[[], Search]: ...


@functools.cache
def engine() -> Engine:
    """Vectorscan where it is installed and runs on this CPU, else Python."""
    found: Engine
    try:
        from nvrx_slurm.attribution.scan import compiled as found
    except ImportError:
        from nvrx_slurm.attribution.scan import literal_search as found

        log.warning("rules are searched for by %s", found.NAME)
    else:
        log.info("rules are searched for by %s", found.NAME)
    return found


class Prefilter:
    """The rules that can have hits, compiled; may be shared by threads. Noise has none: it only takes them away."""

    def __init__(
        self, catalogue: Catalogue, kept: SealedFolder | None = None, searched_by: Engine | None = None
    ) -> None:
        """`kept`: where compiled rules are kept from process to process."""
        self.rules = tuple(rule for rule in catalogue.rules if rule.role != "noise")
        self.noise = tuple(rule for rule in catalogue.rules if rule.role == "noise")
        self._engine, self._kept = searched_by or engine(), kept
        self.telling = self._engine.search(self.rules, "telling", kept) if self.rules else None
        self.noise_literals = self._engine.search(self.noise, "literals", None) if self.noise else None
        self._patterns: dict[int, Callable[[], Search]] = {}

    @functools.cached_property
    def literals(self) -> Callable[[], Search]:
        """What tells of the rules' literals, compiled when first wanted: by a log full of errors."""
        return self._engine.search(self.rules, "literals", self._kept)

    def pattern(self, number: int) -> Callable[[], Search]:
        """A rule's own pattern, compiled when it is first wanted: that takes some milliseconds."""
        if number not in self._patterns:
            self._patterns[number] = self._engine.search([self.rules[number]], "whole", None)
        return self._patterns[number]


class Searcher:
    """Searches for one thread."""

    def __init__(self, prefilter: Prefilter) -> None:
        self.prefilter = prefilter
        self._telling = prefilter.telling() if prefilter.telling else None
        self._noise = prefilter.noise_literals() if prefilter.noise_literals else None
        self._patterns: dict[int, Search] = {}

    def present(self, text: bytes) -> list[int]:
        """The numbers of the rules that may match lines of a text; a rule that is not among them matches none."""
        return sorted(self._telling(text)) if self._telling else []

    def with_literals(self, text: bytes) -> list[int]:
        """The same by literals alone: more rules, and in a text full of errors in a fraction of the time."""
        return sorted(self._literals(text))

    def noise(self, line: bytes) -> list[Rule]:
        """The rules of noise that may match a line."""
        return [self.prefilter.noise[number] for number in self._noise(line)] if self._noise else []

    def may_match(self, number: int, text: bytes) -> bool:
        """The same for one rule, by its whole pattern."""
        if number not in self._patterns:
            self._patterns[number] = self.prefilter.pattern(number)()
        return bool(self._patterns[number](text))

    @functools.cached_property
    def _literals(self) -> Search:
        return self.prefilter.literals()


def prefilter_of(catalogue: Catalogue) -> Prefilter:
    """Kept: to compile hundreds of patterns takes a while. Raises ConfigError for a rule without literals."""
    with _one_at_a_time:
        return _prefilter_of(catalogue)


@functools.lru_cache(_KEPT_CATALOGUES)
def _prefilter_of(catalogue: Catalogue) -> Prefilter:
    return Prefilter(catalogue, SealedFolder(cache_folder() / "rules", _MOST_KEPT_FILES))
