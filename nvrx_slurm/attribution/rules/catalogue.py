"""The catalogue of rules: what a line of a log means for a job that failed.

`load_catalogue` reads the built-in files of this folder and the user's own, which have the same form (docs/rules.md).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import asdict

from nvrx_slurm.attribution.rules.literals import SHORTEST, literals_of
from nvrx_slurm.attribution.rules.rulefile import Role, form_of, read_rule_file, wrong
from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec.yamlfile import YamlFile
from nvrx_slurm.journal.verdicts import Scope, Verdict

BUILT_IN = Path(__file__).parent

_RAISED = re.compile(r"\{raised\}")
_RAISED_IS = r"(?:^|[\])]:? ?|\d: |Z )(?:[\w.]{1,120}\.)?"
_XID = re.compile(r"\{xid (?P<numbers>\d+(?:\|\d+)*)\}")
_XID_IS = r"NVRM: Xid \((?:PCI:)?(?P<gpu>[\w:.]+)\): (?P<xid>%s)(?:,|\b)(?: pid='?(?P<pid>\d+))?"


class Regex(msgspec.Struct, frozen=True):
    """A pattern that is compiled when it is first searched: of all rules a log needs a few."""

    pattern: bytes
    ignore_case: bool = False

    def search(self, line: bytes) -> re.Match[bytes] | None:
        return _compiled(self.pattern, self.ignore_case).search(line)


class Rule(msgspec.Struct, frozen=True):
    """What one kind of line means.

    `pattern` is searched in one line, without its end and without ANSI codes. Its named groups say more: `rank`,
    `node`, `pid`, `t`, `seq`, `collective`, `gpu`, `xid`. One of `literals` stands in every line that matches (lower
    case where `ignore_case`). `verdict` is what a failure means whose cause this is. `role`: a consequence happens
    because something else did; noise is a benign look-alike, and a line that it matches counts for no other rule.
    `severity`: among lines of one rank at one time, the higher is nearer to the cause. `widespread`: where several
    nodes report it, or several ranks of a job's only node, no node is at fault: it is the job's own, and a STOP.
    `below`: the pattern is that of a traceback's header, and the line that counts is the exception's below it.
    `shell`: a batch script's shell complains; that is a cause only where no program's output follows. `environment`:
    what a node has installed or mounted is wrong. Where only the ranks of one of several nodes report it, and ranks
    of others came further, that node is at fault, and a restart on another one helps.
    """

    name: str
    fault: str
    pattern: Regex | re.Pattern[bytes]
    literals: tuple[bytes, ...]
    ignore_case: bool
    verdict: Verdict
    scope: Scope
    role: Role
    severity: int
    hint: str
    reference: str
    sample: tuple[str, ...] = ()
    not_sample: tuple[str, ...] = ()
    widespread: bool = False
    below: bool = False
    shell: bool = False
    environment: bool = False


class Catalogue(msgspec.Struct, frozen=True):
    """Rules with unique names: the built-in ones in the order of their files, then the user's."""

    rules: tuple[Rule, ...]


def load_catalogue(own: Sequence[Path] = ()) -> Catalogue:
    """The built-in rules and those of the user's files. Of two with one name the later one counts.

    A user's rule must match each line of its `sample` and none of its `not_sample`. Raises ConfigError, which lists
    all that is wrong with a file, each with its line and key.
    """
    rules = dict(_built_in())
    for path in own:
        # A rule of the name of a known one takes its place.
        rules |= rules_of(read_rule_file(path), proved=True)
    return Catalogue(tuple(rules.values()))


def usable_files(own: Sequence[Path]) -> tuple[list[Path], list[ConfigError]]:
    """Those of the user's files that `load_catalogue` takes, and what is wrong with each other one."""
    usable: list[Path] = []
    problems: list[ConfigError] = []
    for path in own:
        try:
            rules_of(read_rule_file(path), proved=True)
            usable.append(path)
        except ConfigError as problem:
            problems.append(problem)
    return usable, problems


def built_in_files() -> list[Path]:
    return sorted(BUILT_IN.glob("*.yaml"))


def rules_of(file: YamlFile, *, proved: bool = False) -> dict[str, Rule]:
    """Name → rule, for all of a file; `proved`: tried on their own samples. Raises ConfigError."""
    found: dict[str, Rule] = {}
    problems: list[ConfigError] = []
    for name in file.data:
        try:
            found[name] = _rule(file, name, proved=proved)
        except ConfigError as problem:
            problems.append(problem)
    if problems:
        # Here: a start without problems need not load it.
        from nvrx_slurm.jobspec.reading import together

        raise together(problems)
    return found


@functools.cache
def _built_in() -> dict[str, Rule]:
    found: dict[str, Rule] = {}
    for path in built_in_files():
        found |= rules_of(read_rule_file(path))
    return found


@functools.cache
def _compiled(pattern: bytes, ignore_case: bool) -> re.Pattern[bytes]:
    return re.compile(pattern, re.IGNORECASE if ignore_case else 0)


def _rule(file: YamlFile, name: str, *, proved: bool) -> Rule:
    form = form_of(file, name)
    written_out = _written_out(form.pattern)
    # The built-in rules are tried by the tests. To compile them all takes twice as long as to read them.
    if proved:
        try:
            re.compile(written_out.encode())
        except re.error as error:
            raise wrong(f"is no regular expression: {error}", file, name, "pattern") from None
    bare = _written_out(_RAISED.sub("^", form.pattern))  # what may stand before an exception holds no text of its own
    literals = literals_of(bare, ignore_case=form.ignore_case)
    if not literals:
        sentence = f"must hold a text of at least {SHORTEST} characters that stands in every line it matches"
        raise wrong(f"{sentence}; {form.pattern!r} holds none", file, name, "pattern")
    pattern = Regex(written_out.encode(), form.ignore_case)
    # A rule has all keys of its form, and these instead of the texts.
    fields = asdict(form) | {"name": name, "pattern": pattern, "literals": literals, "verdict": Verdict(form.verdict)}
    rule = Rule(**fields)
    if proved:
        for key, lines, should in (("sample", rule.sample, True), ("not_sample", rule.not_sample, False)):
            for line in lines:
                if (rule.pattern.search(line.encode()) is not None) is not should:
                    verb = "does not match" if should else "matches"
                    raise wrong(f"the pattern {verb} {line!r}", file, name, key)
    return rule


def _written_out(pattern: str) -> str:
    """The pattern with each shorthand replaced by what it stands for."""
    pattern = _RAISED.sub(lambda _: _RAISED_IS, pattern)
    return _XID.sub(lambda match: _XID_IS % match["numbers"], pattern)
