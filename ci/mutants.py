"""`python -m ci.mutants` (`make ci-mutants`): do the checks see? Breaks a copy in a dozen ways, one by one.

For each mutant at least one flow must fail, and of all the simulation must find at least nine within its seeds.
An edit names the text that it replaces; where the product no longer has it, exactly once, the script says so.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("nvrx_slurm", "sbatch", "ci")
SEEDS = 1000
LEAST_FOUND_BY_SIMULATION = 9
FLOWS_S, SIMULATION_S = 300.0, 600.0
_SEED = re.compile(r"--seed (\d+)")


@dataclass(frozen=True, slots=True)
class Edit:
    """One place of the source, and what stands there instead."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """A way in which the product could be broken. `flows`: globs of those that should fail because of it."""

    name: str
    flows: tuple[str, ...]
    edits: tuple[Edit, ...]


CORE, CONTROLLER = "nvrx_slurm/core", "nvrx_slurm/controller/controller.py"

MUTANTS = (
    Mutant(
        "a spare is not promoted",
        ("spare-takes-over",),
        (Edit(f"{CORE}/rendezvous.py", "here - unwanted, spares, want)", "here - unwanted, [], want)"),),
    ),
    Mutant(
        "a stale record is accepted",
        ("two-failures-one-restart",),
        (
            Edit(
                f"{CORE}/membership.py",
                " or fact.incarnation != node.incarnation:\n        return None\n    ret",
                ":\n        return None\n    ret",
            ),
            Edit(f"{CORE}/membership.py", "return node if fact.seq > node.seq else None", "return node"),
            Edit(
                f"{CORE}/job.py",
                "return replica if replica.phase is Phase.RUNNING and replica.cycle == cycle else None",
                "return replica",
            ),
        ),
    ),
    Mutant(
        "a teardown without its kill",
        ("deaf-worker",),
        (
            Edit(
                "nvrx_slurm/agent/teardown.py", 'while ORDER[at] != "kill" and', 'while ORDER[at] != "terminate" and'
            ),
        ),
    ),
    Mutant(
        "the journal after the act",
        ("controller-killed-in-a-rendezvous",),
        (
            Edit(
                CONTROLLER,
                "        server_time = await self.store.commit(\n            self.epoch,\n            batch.entries,",
                "        due, self.unwritten = getattr(self, 'unwritten', []), batch.entries\n"
                "        server_time = await self.store.commit(\n            self.epoch,\n            due,",
            ),
        ),
    ),
    Mutant(
        "a reap without a fence",
        ("frozen-node",),
        (Edit(f"{CORE}/job.py", "return [fence, *_lose(", "return [*_lose("),),
    ),
    Mutant(
        "a later reason overwrites the first",
        ("first-reason-wins",),
        (
            Edit(f"{CORE}/job.py", "if job.shutdown is not None or fact.generation", "if fact.generation"),
            Edit(
                f"{CORE}/job.py",
                "    if job.shutdown is None:\n        job.shutdown = _shutdown_in(decisions)\n",
                "    job.shutdown = _shutdown_in(decisions) or job.shutdown\n    if not job.ended:\n",
            ),
        ),
    ),
    Mutant(
        "restarts are not counted",
        ("crash-loop",),
        (Edit(f"{CORE}/restart_decision.py", "    times.append(now)\n", ""),),
    ),
    Mutant(
        "nobody is told to leave",
        ("happy-path", "success-while-a-spare-waits"),
        (Edit(CONTROLLER, "ReplicaEnded, Shutdown, Fence, DumpOrdered)", "ReplicaEnded, Fence, DumpOrdered)"),),
    ),
    Mutant(
        "ranks are given away before the proof of death",
        ("frozen-node",),
        (Edit(f"{CORE}/rendezvous.py", "    if replica.unsafe:\n        return []\n    bounds", "    bounds"),),
    ),
    Mutant(
        "a rendezvous does not wait for the verdict",
        ("attribution-service-changes-its-mind",),
        (
            Edit(
                f"{CORE}/restart_decision.py",
                "if not pending.waits or now >= pending.due_at",
                "if True or now >= pending.due_at",
            ),
        ),
    ),
    Mutant(
        "a late STOP ends the job",
        ("attribution-service-late",),
        (
            Edit(
                f"{CORE}/restart_decision.py",
                "    if pending.decided or not pending.waits or",
                "    if not pending.waits or",
            ),
        ),
    ),
    Mutant(
        "one replica's failure restarts them all",
        ("roles-*",),
        (Edit(f"{CORE}/restart.py", '"restart_replica": _restart_replica', '"restart_replica": _restart_job'),),
    ),
)


@contextmanager
def broken(edits: Sequence[Edit]) -> Iterator[Path]:
    """A copy of the product with these edits."""
    with tempfile.TemporaryDirectory(prefix="nvrx-mutant-") as name:
        folder = Path(name)
        for part in COPIED:
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        for edit in edits:
            path = folder / edit.file
            text = path.read_text()
            if text.count(edit.old) != 1:
                sys.exit(f"ci.mutants: {edit.file} has this {text.count(edit.old)} times, not once: {edit.old!r}")
            path.write_text(text.replace(edit.old, edit.new))
        yield folder


def ci(folder: Path, *words: str, timeout_s: float) -> tuple[int, str]:
    """`nvrx-slurm ci …` of that copy: its exit code and what it printed."""
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [sys.executable, "-m", "nvrx_slurm", "ci", *words]
    done = subprocess.run(
        argv, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
    )
    return done.returncode, done.stdout


def flows_see(folder: Path, mutant: Mutant, stage: str) -> str | None:
    """The flows that failed, or None. Raises SystemExit where they could not be run at all."""
    chosen = [word for glob in mutant.flows for word in ("--flow", glob)]
    artifacts = folder / "artifacts"
    code, said = ci(
        folder, "run", "ci/flows", *chosen, "--on", stage, "--artifacts", str(artifacts), timeout_s=FLOWS_S
    )
    if code not in (0, 1, 124):
        sys.exit(f"ci.mutants: the flows of {mutant.name!r} could not be run ({code}):\n{said}")
    return None if code == 0 else ", ".join(mutant.flows)


def simulation_sees(folder: Path, seeds: int) -> str | None:
    """The first seed that failed, or None."""
    code, said = ci(folder, "simulate", "--seeds", str(seeds), "--jobs", "2", timeout_s=SIMULATION_S)
    if code == 0:
        return None
    found = _SEED.search(said)
    if code != 1 or found is None:
        sys.exit(f"ci.mutants: the simulation could not be run ({code}):\n{said}")
    return found.group(1)


def main() -> int:
    """0: every mutant was seen by a flow, and enough of them by the simulation."""
    parser = argparse.ArgumentParser(prog="python -m ci.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--on", default="dev", choices=("local", "dev"), help="where the flows run")
    parser.add_argument("--only", metavar="WORDS", default="", help="mutants whose name has these words")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds of the simulation for each mutant")
    chosen = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if chosen.only in mutant.name]
    with broken(()) as folder:
        for mutant in mutants:
            if flows_see(folder, mutant, chosen.on):
                sys.exit(f"ci.mutants: the flows for {mutant.name!r} fail on the product as it is")
    missed = found = 0
    print(f"{'mutant':52} {'failed flows':28} seed")
    for mutant in mutants:
        with broken(mutant.edits) as folder:
            flows, seed = flows_see(folder, mutant, chosen.on), simulation_sees(folder, chosen.seeds)
        missed, found = missed + (flows is None), found + (seed is not None)
        print(f"{mutant.name:52} {flows or 'NONE':28} {seed or 'none'}", flush=True)
    print(f"flows saw {len(mutants) - missed} of {len(mutants)}, the simulation {found}")
    return int(missed > 0 or (not chosen.only and found < LEAST_FOUND_BY_SIMULATION))


if __name__ == "__main__":
    sys.exit(main())
