"""The texts of which one stands in every line that a pattern matches, for a fast search ahead of the pattern.

The parser inside `re` is not used: it takes a millisecond for each rule, and is private.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# A shorter text stands in too many lines to narrow the search.
SHORTEST = 4

_TOKEN = re.compile(
    r"""(?P<quantifier> (?:[*+?]|\{(?P<least>\d*)(?:,\d*)?\})[?+]? )
      | (?P<text>       (?:[^\\\[(){}|*+?.^$]+|\}|\{(?!\d*,?\d*\}))+ | \\(?P<escaped>[^A-Za-z0-9]) )
      | (?P<open>       \((?!\?)|\(\?(?:P<\w+>|:) )
      | (?P<aside>      \(\?(?:[=!>]|<[=!]|[aiLmsux-]+:) )
      | (?P<strange>    \(\? )
      | (?P<close>      \) )
      | (?P<or>         \| )
      | (?P<other>      \[\^?\]?(?:\\.|[^\]\\])*\] | \\(?:x..|u.{4}|[0-9]{1,3}|.) | [.^$] )""",
    re.VERBOSE | re.DOTALL,
)

_Texts = tuple[str, ...]


def literals_of(pattern: str, *, ignore_case: bool = False) -> tuple[bytes, ...]:
    """At least one of these stands in each line that matches, in lower case with `ignore_case`.

    Empty: no such set of texts of four characters or more is found. The pattern must be one that `re` accepts.
    """
    levels = [_Level()]
    for token in _TOKEN.finditer(pattern):
        kind, level = token.lastgroup, levels[-1]
        if kind == "text":
            level.add(token["escaped"] or token.group())
        elif kind == "quantifier":
            level.repeat(optional=token.group()[0] in "*?" or not int(token["least"] or token.group()[0] == "+"))
        elif kind in ("open", "aside"):
            level.end_run()
            levels.append(_Level(counts=kind == "open"))
        elif kind == "close":
            levels.pop()
            levels[-1].last_group = level.texts()
        elif kind == "or":
            level.end_branch()
        elif kind == "strange":
            return ()
        else:
            level.end_run()
    texts = levels[0].texts()
    if ignore_case:
        texts = tuple(text.lower() for text in texts)
    return tuple(dict.fromkeys(text.encode() for text in texts)) if _worth(texts) >= SHORTEST else ()


class _Level:
    """A group whose end has not come: in each branch, sets of texts of which a match holds one each."""

    def __init__(self, *, counts: bool = True) -> None:
        self.last_group: _Texts = ()  # a quantifier may still make it optional
        self._counts = counts
        self._run = ""
        self._sets: list[_Texts] = []
        self._branches: list[_Texts] = []

    def add(self, text: str) -> None:
        self._keep_group()
        self._run += text

    def repeat(self, *, optional: bool) -> None:
        """A quantifier: it is about the group before it, or else about the last character of the run."""
        if optional:
            self.last_group = ()
            self._run = self._run[:-1]
        self.end_run()

    def end_run(self) -> None:
        self._keep_group()
        if self._run:
            self._sets.append((self._run,))
            self._run = ""

    def end_branch(self) -> None:
        self.end_run()
        # The search needs one set of each branch: that whose shortest text is the longest.
        self._branches.append(max(self._sets, key=_worth, default=()))
        self._sets = []

    def texts(self) -> _Texts:
        """One text of each branch; empty where a branch has none, and for what only looks around."""
        self.end_branch()
        return sum(self._branches, ()) if self._counts and all(self._branches) else ()

    def _keep_group(self) -> None:
        if self.last_group:
            self._sets.append(self.last_group)
            self.last_group = ()


def _worth(texts: Sequence[str]) -> int:
    return min(map(len, texts), default=0)
