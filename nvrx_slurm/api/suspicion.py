"""Suspect nodes, for users who submit jobs and for administrators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from string import digits
from typing import TYPE_CHECKING

from nvrx_slurm.attribution.blames import Suspect
from nvrx_slurm.attribution.ledger import Ledger, open_ledger
from nvrx_slurm.cluster.slurm_config import named_cluster
from nvrx_slurm.errors import ConfigError, SlurmUnreachable

if TYPE_CHECKING:
    from nvrx_slurm.jobspec.model import JobSpec


def ledger_for(where: str | None, cluster: str | None = None) -> Ledger:
    """The ledger at `where` (None: the user's own), of `cluster` (None: the one that Slurm's commands here speak to).

    Raises UsageError, and SlurmUnreachable where it is not known which cluster this is.
    """
    name = cluster or named_cluster()
    if name is None:
        raise SlurmUnreachable("no Slurm here says which cluster this is: name it with --cluster")
    return open_ledger(where, cluster=name)


def configured_ledger() -> str | None:
    """Where the environment or a site file has the ledger, for commands without a job.yaml. Raises ConfigError."""
    from nvrx_slurm.jobspec.load import load_without_job

    return load_without_job().fault_tolerance.attribution.ledger


def suspects_of(spec: JobSpec, where: str | None) -> list[Suspect]:
    """The suspect nodes of the cluster that the job goes to. `where`: its plan's ledger. Raises what `ledger_for`
    does, and StoreUnreachable."""
    elsewhere = spec.slurm.extra.get("clusters")
    # Of a list of clusters sbatch chooses one only when the job is submitted.
    return ledger_for(where, elsewhere if isinstance(elsewhere, str) and "," not in elsewhere else None).suspects()


def worst_of(suspect: Suspect) -> str:
    """What speaks against the node most, in words."""
    worst = suspect.blames[0]
    return ": ".join(part for part in (worst.fault or worst.kind, worst.evidence) if part)


def avoiding(spec: JobSpec, where: str | None, say: Callable[[str], None]) -> JobSpec:
    """The same job without the nodes that are suspect now: `slurm.exclude` holds these too. `say` gets a line for
    each. Raises as `suspects_of`, and ConfigError."""
    suspects = suspects_of(spec, where)
    for suspect in suspects:
        say(f"excluding suspect node {suspect.node} ({worst_of(suspect)})")
    if not suspects:
        say("no node is suspect: none is excluded")
        return spec
    from msgspec.structs import replace

    from nvrx_slurm.report.words import names

    listed = spec.slurm.exclude
    excluded = [listed] if listed else []
    if listed and "/" in listed:  # sbatch takes it for a file that lists nodes
        try:
            excluded = Path(listed).read_text().replace(",", "\n").split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the file {listed} cannot be read ({error}), and so suspect nodes cannot be added to it",
                key="slurm.exclude",
            ) from None
    prefixes = ((suspect.node.rstrip(digits), suspect.node) for suspect in suspects)
    # n9 before n10: neighbours fold into one range.
    numbered = sorted((prefix, int(node.removeprefix(prefix) or 0), node) for prefix, node in prefixes)
    excluded.append(names([node for _, _, node in numbered]))
    return replace(spec, slurm=replace(spec.slurm, exclude=",".join(excluded)))
