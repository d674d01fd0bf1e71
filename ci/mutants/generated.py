"""`python -m ci.mutants.generated [SUBJECT…]` (`make ci-mutants-generated`): mutants that mutmut makes of pure code.

Each operator, constant, argument and condition is changed in turn, some thousand times, against the unit tests of the
module. Text for people (every statement with an f-string) is left out: tests compare fields, not prose. What survives
is listed in `survivors.toml` with the reason why no test can kill it, or is a hole in the tests.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ci.mutants.product_copy import COPIED, ProductCopy

LEAST_SCORE = 0.95
SURVIVORS = Path(__file__).with_name("survivors.toml")
# What is slow is left out: a property that is searched for takes as long as all other tests of its module.
OF_CORE = ("tests/unit/core", "--ignore=tests/unit/core/test_history.py")
SUBJECTS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{
        f"core.{name}": (f"nvrx_slurm/core/{name}.py", OF_CORE)
        for name in (
            "assignment",
            "cause",
            "job",
            "limits",
            "liveness",
            "membership",
            "rendezvous",
            "requests",
            "restart_decision",
            "restart",
            "suspension",
        )
    },
    **{
        f"controller.{name}": (f"nvrx_slurm/controller/{name}.py", ("tests/unit/controller",))
        for name in (
            "attribution_broker",
            "attribution_requests",
            "controller",
            "environment",
            "failure_detector",
            "mirror",
        )
    },
    "ledger": ("nvrx_slurm/inprocess/ledger.py", ("tests/unit/inprocess/test_ledger.py",)),
    "barriers": ("nvrx_slurm/inprocess/barriers.py", ("tests/unit/inprocess/test_barriers.py",)),
    "slots": (
        "nvrx_slurm/transport/slots.py",
        ("tests/unit/transport/test_slots.py", "tests/unit/transport/test_docs.py"),
    ),
}
PROSE = (r'\bf"', r"\blog\.", r"\b(reason|silent|few|within) = ")

DRAWING = re.compile(r"\.x_(with_)?diagram__")
"""What draws a page of docs/ is left out too: a test compares the page."""


def configure(copy: ProductCopy, source: str, tests: Sequence[str]) -> None:
    """Give the copy mutmut's settings; it makes its mutants in a folder below."""
    settings = {
        "source_paths": ["nvrx_slurm"],
        "only_mutate": [source],
        "also_copy": [name for name in COPIED if name not in ("nvrx_slurm", "tests", "pyproject.toml")],
        "pytest_add_cli_args": ["-p", "no:cacheprovider", "--no-header", "--tb=no"],
        "pytest_add_cli_args_test_selection": list(tests),
        "do_not_mutate_patterns": list(PROSE),
    }
    path = copy.folder / "pyproject.toml"
    # A list of strings in Python is one in TOML too, but for how a quote is written.
    lines = [f"{key} = [{', '.join(_quoted(value) for value in values)}]" for key, values in settings.items()]
    before = path.read_text().partition("\n[tool.mutmut]")[0]
    path.write_text("\n".join([before, "[tool.mutmut]", *lines, "use_git_change_detection = false", ""]))
    del copy.env["PYTHONPATH"]  # the mutants' folder comes first by pytest's `pythonpath`


def _quoted(text: str) -> str:
    assert "'" not in text
    return f"'{text}'"


def mutmut(copy: ProductCopy, *words: str) -> str:
    """What it prints."""
    argv = [sys.executable, "-m", "mutmut", *words]
    done = subprocess.run(
        argv, cwd=copy.folder, env=copy.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode not in (0, 1):
        sys.exit(
            f"ci.mutants.generated: mutmut {' '.join(words)} ended with {done.returncode}:\n{done.stdout[-4000:]}"
        )
    return done.stdout


def changed_line(diff: str) -> tuple[str, str]:
    """The line that a mutant changes, before and after."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++", "# "))]
    old = [line[1:].strip() for line in lines if line.startswith("-")]
    new = [line[1:].strip() for line in lines if line.startswith("+")]
    return " ".join(old), " ".join(new)


def main() -> int:
    """0: of the mutants that are not listed as equivalent at least 95 % were killed."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m ci.mutants.generated", description=__doc__.splitlines()[0])
    parser.add_argument(
        "subjects", nargs="*", metavar="SUBJECT", help=f"of {', '.join(SUBJECTS)}; globs; by default all"
    )
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    survivors = tomllib.loads(SURVIVORS.read_text())
    globs = options.subjects or ["*"]
    failed = False
    for subject, (source, tests) in SUBJECTS.items():
        if not any(fnmatchcase(subject, glob) for glob in globs):
            continue
        # By subject: a line that is written twice may be tested in one place and not in the other.
        listed = {(each["old"], each["new"]) for each in survivors.get(subject, [])}
        with tempfile.TemporaryDirectory(prefix="nvrx-mutmut-") as name:
            copy = ProductCopy(Path(name))
            configure(copy, source, tests)
            mutmut(copy, "run", "--max-children", str(options.jobs))
            listed_outcomes = (
                line.strip().split(": ") for line in mutmut(copy, "results", "--all", "true").splitlines()
            )
            outcomes = {mutant: outcome for mutant, outcome in listed_outcomes if not DRAWING.search(mutant)}
            left = [
                (mutant, *changed_line(mutmut(copy, "show", mutant)))
                for mutant, outcome in outcomes.items()
                if outcome not in ("killed", "timeout", "caught by type check")
            ]
        unlisted = [(mutant, old, new) for mutant, old, new in left if (old, new) not in listed]
        killed, equivalent = len(outcomes) - len(left), len(left) - len(unlisted)
        score = killed / (killed + len(unlisted)) if outcomes else 0.0
        failed = failed or score < LEAST_SCORE
        counts = ", ".join(f"{count} {outcome}" for outcome, count in Counter(outcomes.values()).items())
        print(f"{subject}: {score:.1%} of {killed + len(unlisted)}; {counts}; {equivalent} listed as equivalent")
        for mutant, old, new in unlisted:
            print(f"  {mutant}\n    - {old}\n    + {new}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
