"""What `nvrx-slurm --help` costs, and that it imports nothing it does not need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.commands import COMMAND_S, time_all
from bench.tables import Target, print_rows, print_target, print_targets

FLOOR = "python -c pass"
CLICK = "python -c 'import click'"
HELP = "nvrx-slurm --help"
MOST = 4.5
RUNS_EACH = 4  # a run takes tens of ms: more of them cost nothing and steady the median
FORBIDDEN = ("redis", "pydantic", "submitit", "jinja2", "rich", "msgspec", "ruamel", "asyncio")


def startup(runs: int, peers: Path) -> None:
    """Time it in turns with the floor, then look at its imports."""
    commands = {
        FLOOR: (sys.executable, "-c", "pass"),
        CLICK: (sys.executable, "-c", "import click"),
        HELP: (str(Path(sys.executable).with_name("nvrx-slurm")), "--help"),
    }
    samples = time_all(commands, runs * RUNS_EACH, {})
    print_rows("start-up", samples, unit="ms", first=FLOOR)
    print_targets(samples, [Target(f"≤ {MOST:g} × {FLOOR}", FLOOR, (HELP,), at_most=MOST)])
    found = sorted(imported_by_help().intersection(FORBIDDEN))
    print_target(f"no import of {', '.join(FORBIDDEN)}", len(found), at_most=0)
    if found:
        print(f"  imported all the same: {', '.join(found)}")


def imported_by_help() -> set[str]:
    """The top-level names of every module that `python -m nvrx_slurm --help` imports."""
    argv = [sys.executable, "-X", "importtime", "-m", "nvrx_slurm", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=COMMAND_S).stderr
    names = [line.rpartition("|")[2].strip() for line in done.splitlines() if line.startswith("import time:")]
    return {name.partition(".")[0] for name in names}
