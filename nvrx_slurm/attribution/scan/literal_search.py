"""The search for rules in Python alone, where Vectorscan is not installed: by their literals, one after the other.

It names every rule that Vectorscan names, and more. `re` decides what matches in either case, so the verdict is the
same. A log is read at some megabytes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nvrx_slurm.attribution.catalogue import Rule
from nvrx_slurm.attribution.scan.relaxed import relaxed_to_literals
from nvrx_slurm.journal.sealed import SealedFolder

NAME = "Python, slowly: Vectorscan is not installed; pip install 'nvrx-slurm[vectorscan]'"


def search(
    rules: Sequence[Rule], forms: str, kept: SealedFolder | None
) -> Callable[[], Callable[[bytes], list[int]]]:
    """See `compiled.search`; nothing is compiled or kept. Raises ConfigError for a rule without literals."""
    for rule in rules:
        relaxed_to_literals(rule)  # refuses it as Vectorscan's side does
    exact = [(number, rule.literals) for number, rule in enumerate(rules) if not rule.ignore_case]
    caseless = [(number, rule.literals) for number, rule in enumerate(rules) if rule.ignore_case]

    def found(text: bytes) -> list[int]:
        present = [number for number, literals in exact if any(literal in text for literal in literals)]
        if caseless:
            lower = text.lower()
            present += [number for number, literals in caseless if any(literal in lower for literal in literals)]
        return present

    return lambda: found
