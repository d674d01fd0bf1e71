"""What a rank did after a line: whether that line ended it, or the rank survived it. Pure.

An error that was caught and retried reads the same as one that was not. What follows differs: a process that ends
prints stacks and errors, one that lives prints progress.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum, IntEnum

import msgspec
from msgspec.structs import replace


class Nature(Enum):
    """What kind of line it is."""

    PROGRESS = "progress"  # a step of training was made
    CRASH = "crash"  # stacks, errors, clean-up: what a process prints while it ends
    RECOVERED = "recovered"  # what had failed was tried again, and succeeded
    CALM = "calm"  # anything else


class Finality(IntEnum):
    """How surely a line ended its rank; lower is surer."""

    ENDED = 0
    LIKELY = 1
    SURVIVED = 2


class TailLine(msgspec.Struct, frozen=True):
    """One of the last lines of a file. `offset`: of its first byte, in the unpacked file. `rank`: by the line's label
    or the file's name. `kind`: where the text alone does not show it. Or several lines (`times`) of one `kind`,
    without their text: `condensed`."""

    offset: int
    text: str
    rank: int | None = None
    times: int = 1
    kind: Nature | None = None

    @property
    def nature(self) -> Nature:
        return nature(self.text) if self.kind is None else self.kind


class Aftermath(msgspec.Struct, frozen=True):
    """How many lines of each kind the same rank printed afterwards, as far as the file's tail goes. `stepped`: it
    printed steps before."""

    progress: int = 0
    calm: int = 0
    stepped: bool = False


_PROGRESS = re.compile(
    r"""\b(?:iter(?:ation)?|(?:global[_ ])?step|batch|epoch)s?\b
        ['"]?\s*[:=#]?\s*['"]?\[?\s*\d+                              # iteration 12/ 100, step=12, {"step": 12
      | \bit\b\s*\d+\s*/\s*\d+
      | ^\W*\d+%\|.{0,80}\d+/\d+                                    # tqdm's bar
      | \bit/s\b|\bs/it\b
      | (?:\b|_)loss\b['"]?\s*[:=]?\s*['"]?-?\d+\.\d                # loss: 2.31, {'loss': 2.31, train_loss=2.31
      | \b(?:samples|tokens)(?:/s|\s+per\s+sec)""",
    re.VERBOSE | re.IGNORECASE,
)
# In a progress bar: `120/1000 [00:10<01:00, 3.20it/s, loss=2.1]`, `120it [00:10, 3.20it/s]`.
_BAR = re.compile(
    r"(?<![\d.])(?P<done>\d[\d.]{0,12}[kMGT]?)(?:/(?P<total>\d[\d.]{0,12}[kMGT]?)|[A-Za-z]{1,8}) \[\d+:\d\d"
)
_LETTERS = re.compile(r"[A-Za-z]+")
# What stands at a line's beginning is tried there only: these are asked for thousands of lines.
_CRASH_BEGINS = re.compile(
    r"""\s*$ | \s+File\ " | \s+(?:\^|~)+ | Traceback\b | \s*frame\ \#\d | \s*at\ \S+\( | \s{4,}\S
      | (?:Fatal\ Python\ error|Current\ thread|Thread\ 0x|Extension\ modules)
      | \S*(?:Error|Exception|Exit|Interrupt|Warning)\b | \*\*\*|\#\d+\s
      | (?:={8,}+|-{8,}+)(?!\ *(?i:step|iter(?:ation)?|epoch|batch)\b)  # a rule, unless it is that of a step
      | \[?(?:rank|default)?\d*\]?:?\s*\[?[EF]\d{4}\ | (?:During\ handling|The\ above\ exception)\b
      | (?:Search\ for\ `|CUDA\ kernel\ errors\ might|For\ debugging\ consider|Compile\ with\ `TORCH_USE_)
      | (?:srun|slurmstepd|wandb|sacct|seff|scontrol|sbatch|pdsh@\S+|mpirun|prterun|ORTE):
    """,
    re.VERBOSE,
)
_CRASH = re.compile(
    r"""\b(?: (?:ERROR|CRITICAL|FATAL|SIG[A-Z]{3,5}|abort(?:ed|ing)?|terminat(?:e|ed|ing)|destroy(?:ed|ing)?)\b
          | [Ss]ignal\ \d | (?:core\ dumped|Killed|exit(?:ing|ed|code)?|shut(?:ting)?\ ?down)\b
          | Killing\ subprocess\b | NCCL\ (?:INFO|WARN)\b | (?:time|host)\s+:\s )
      | \[launch\.py:\d+: | \bAssertion\ `.{1,300}`?\ failed\b
    """,
    re.VERBOSE,
)
# What scripts print at any end of theirs: no sign of life.
_EPILOGUE = re.compile(
    r"""(?:declare\ -x\ |export\ )?[A-Z_][A-Z0-9_]*= | BASH_FUNC_ | \}$  # env
      | [A-Za-z][\w.\[\]-]*(?:==|\ @\ )\S+$                            # pip freeze
      | [a-z_][\w.-]*\ {2,}\d[\w.+!]*\ {2,}\S+                          # conda list
      | [|+][-=+|\ ] | [|].*[|]$                                        # nvidia-smi
      | (?:Job\ ID|Cluster|User/Group|Cores(?:\ per\ node)?|Nodes|(?:CPU|Memory)\ [UE]\w+|Job\ Wall-clock\ time):
    """,
    re.VERBOSE,
)

_RECOVERED = re.compile(
    r"\b(?:succeeded|recovered|reconnected)\b.{0,40}\b(?:attempts?|retry|retries|tries)\b"
    r"|\b(?:attempt|retry|try)\b.{0,30}\b(?:succeeded|successful)\b",
    re.IGNORECASE,
)
_AS_MUCH_AS_STEPS = 4

# Kinds of non-fatal exceptions (scan/tracebacks.py).
# They ended something, if not the rank: worth reporting.
BESIDE_THE_RANK = frozenset({"thread", "process"})

_NEVER_ENDED = frozenset({"ignored", "task", "thread"})
_MAY_HAVE_GONE_ON = frozenset({"process", "logged", "warned"})

_MOST_CALM_AT_AN_END = 6
_MOST_CALM_AFTER_A_TRACEBACK = 15
_MOST_CALM_BEFORE_AN_END = 60
_MOST_CALM_OF_A_SCRIPT = 10


def nature(text: str) -> Nature:
    """What kind of line this is, without its label."""
    # First: such a line often has the words of the error that its rank has recovered from.
    if _RECOVERED.search(text):
        return Nature.RECOVERED
    if _CRASH_BEGINS.match(text) or _CRASH.search(text):
        return Nature.CRASH
    if _PROGRESS.search(text):
        return Nature.PROGRESS
    return Nature.CRASH if _EPILOGUE.match(text) else Nature.CALM


def bar_of(text: str) -> tuple[str, str] | None:
    """Which progress bar a line draws, and how far it is; None: it draws none."""
    bar = _BAR.search(text)
    return bar and (f"{''.join(_LETTERS.findall(text, 0, bar.start()))}/{bar['total']}", bar["done"])


def aftermath(offset: int, rank: int | None, tail: Sequence[TailLine]) -> Aftermath:
    """What `rank` printed after the line at `offset`; what every rank printed, where None."""
    own = [line for line in tail if rank is None or line.rank in (rank, None)]
    kinds: Counter[Nature] = Counter()
    for line in own:
        if line.offset > offset:
            kinds[line.nature] += line.times
    recovered = _AS_MUCH_AS_STEPS * kinds[Nature.RECOVERED]
    before = itertools.takewhile(lambda line: line.offset < offset, own)
    stepped = any(line.nature is Nature.PROGRESS for line in before)
    return Aftermath(kinds[Nature.PROGRESS] + recovered, kinds[Nature.CALM], stepped)


def condensed(tail: Iterable[TailLine], offsets: Iterable[int]) -> tuple[TailLine, ...]:
    """The lines between two of the `offsets`: how many of each rank and kind, in the place of the first of them.

    For a hit at any of the offsets the aftermath is the same, at a cost by the hits, not by the lines."""
    borders = sorted(set(offsets))
    runs: dict[tuple[int, int, int | None, Nature], TailLine] = {}
    for line in tail:
        # A hit's own line is neither before nor after it: it is a part of its own.
        part = bisect.bisect_left(borders, line.offset), bisect.bisect_right(borders, line.offset)
        key = (*part, line.rank, line.nature)
        before = runs.get(key)
        if before is None:
            runs[key] = TailLine(line.offset, "", line.rank, line.times, line.nature)
        else:
            runs[key] = replace(before, times=before.times + line.times)
    return tuple(runs.values())


def may_have_gone_on(non_fatal: str | None) -> bool:
    """Whether a rank survives such an exception, unless it is seen to have ended."""
    return non_fatal in _MAY_HAVE_GONE_ON


def never_ends_the_rank(non_fatal: str | None) -> bool:
    """Whether such an exception is another than the one that ends the rank."""
    return non_fatal in _NEVER_ENDED or non_fatal == "process"


def finality(
    after: Aftermath, *, shared: bool, non_fatal: str | None = None, traceback: bool = False, shell: bool = False
) -> Finality:
    """Judge by what followed. `shared`: other ranks, which go on a little, print into the same file. `traceback`: the
    line ends one, which only steps of training contradict: a launcher's epilogue of 64 ranks, an `env` or a
    `pip freeze` in a trap are no sign of life. `shell`: a script's shell complains, and goes on."""
    if shell and (after.progress or after.calm > _MOST_CALM_OF_A_SCRIPT):
        return Finality.SURVIVED
    most_progress = 3 if shared else 0 if may_have_gone_on(non_fatal) else 1
    if non_fatal in _NEVER_ENDED or after.progress > most_progress:
        return Finality.SURVIVED
    if non_fatal == "process" and after.calm <= _MOST_CALM_BEFORE_AN_END:
        return Finality.LIKELY
    is_uncaught = traceback and non_fatal is None
    # It had made steps, and makes none: the training is over, even if more is printed.
    most = _MOST_CALM_AFTER_A_TRACEBACK if is_uncaught and not after.progress else _MOST_CALM_AT_AN_END
    if after.calm <= most or (is_uncaught and after.stepped and not after.progress):
        return Finality.ENDED
    if after.calm <= _MOST_CALM_BEFORE_AN_END or is_uncaught:
        return Finality.LIKELY
    return Finality.SURVIVED
