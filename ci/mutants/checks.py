"""What a mutant can die by: unit tests, the simulation, flows. Each returns who killed it, or None: it survived."""

from __future__ import annotations

import re
import subprocess
import sys

from ci.mutants.model import Mutant, Simulation
from ci.mutants.product_copy import ProductCopy

UNITS_S, SIMULATION_S, FLOWS_S = 180.0, 300.0, 300.0
# The dump of a test that hangs is not read, and Python 3.11 has crashed while it printed one.
PYTEST = ("-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0", "-rfE")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
_ALL_PASSED, _SOME_FAILED, _INTERRUPTED = 0, 1, 2
_OUTCOME = re.compile(r"^(?P<kind>kept|broken|crashed)(?: (?P<seed>\d+) (?P<what>.*))?$", re.MULTILINE)
_FIRST_BROKEN = "-W", "ignore", "-m", "ci.mutants.first_broken"


def by_units(copy: ProductCopy, mutant: Mutant) -> str | None:
    """The first test of the mutant's own that fails."""
    code, output = _run(copy, "-m", "pytest", *PYTEST, *mutant.tests, timeout_s=UNITS_S)
    if code is None:
        return f"unit tests: no end within {UNITS_S:.0f} s"
    if code == _ALL_PASSED:
        return None
    failed = _FAILED.search(output)
    if code not in (_SOME_FAILED, _INTERRUPTED) or failed is None:
        sys.exit(f"ci.mutants: the unit tests of {mutant.name} could not be run ({code}):\n{output}")
    return failed.group(1).removeprefix("tests/")


def by_simulation(copy: ProductCopy, of: Simulation, seeds: int, nodes: int) -> str | None:
    """The promise that the simulation finds broken, and at which seed."""
    code, output = _run(copy, *_FIRST_BROKEN, of, str(seeds), str(nodes), timeout_s=SIMULATION_S)
    if code is None:
        return f"simulation: no end within {SIMULATION_S:.0f} s"
    outcome = _OUTCOME.search(output)  # among warnings that the interpreter prints at its end
    if code != 0 or outcome is None:
        return f"simulation: exit code {code}: {(output.splitlines() or [''])[-1]}"
    if outcome["kind"] == "kept":
        return None
    crash = "" if outcome["kind"] == "broken" else "crash: "
    return f"simulation: {crash}{outcome['what']}, seed {outcome['seed']}"


def by_flows(copy: ProductCopy, mutant: Mutant, stage: str) -> str | None:
    """The flows of the mutant's own, if one of them fails."""
    chosen = [word for glob in mutant.flows for word in ("--flow", glob)]
    artifacts = copy.folder / "artifacts" / mutant.name
    words = ("ci", "run", "ci/flows", *chosen, "--on", stage, "--artifacts", str(artifacts))
    code, output = _run(copy, "-m", "nvrx_slurm", *words, timeout_s=FLOWS_S)
    if code not in (0, 1, 124):
        sys.exit(f"ci.mutants: the flows of {mutant.name} could not be run ({code}):\n{output}")
    return None if code == 0 else f"flow {', '.join(mutant.flows)}"


def _run(copy: ProductCopy, *words: str, timeout_s: float) -> tuple[int | None, str]:
    """A Python in the copy: its exit code (None: it took too long) and its output."""
    try:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=copy.folder,
            env=copy.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        # What was read by then is bytes here, although `text` is set.
        output = error.stdout or b""
        return None, output.decode(errors="replace") if isinstance(output, bytes) else output
    finally:
        copy.end_processes()
    return done.returncode, done.stdout
