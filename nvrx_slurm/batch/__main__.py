"""`python -m nvrx_slurm.batch --cluster slurm -- srun … < plan.json`: what the job script ends in."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from nvrx_slurm.attribution.ledger.ledger import cluster_of, suspects_among
from nvrx_slurm.batch.host import Host, Launch
from nvrx_slurm.cluster.slurm_config import KillWaitQuestion
from nvrx_slurm.errors import MalformedRecord, NvrxError, UsageError
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.plan import Plan, plan_from_json
from nvrx_slurm.jobspec.secret_file import secret_in
from nvrx_slurm.journal.folder import LOOPBACK, JobFolder, JobInfo
from nvrx_slurm.liveness.connection import address_towards
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.files import digest_of_plan, open_log
from nvrx_slurm.util.log import set_up
from nvrx_slurm.util.processes import boot_id, raise_descriptor_limit, started_ticks

SCONTROL_S = 60.0
KILL_WAIT_ANSWER_S = 5.0
"""How long the start of a job may be held up by a slurmctld that does not answer."""

_ANY_OUTSIDE = "10.255.255.255"  # never sent to: it only makes the kernel choose the interface that leads outside


def advertised_address() -> str:
    """The IPv4 address that this host's name stands for; else that of the default route; else loopback."""
    with contextlib.suppress(OSError):
        for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM):
            address = str(entry[4][0])
            if not ipaddress.ip_address(address).is_loopback:
                return address
    return default_route_address()


def default_route_address() -> str:
    """The IPv4 address of the interface that leads outside; else loopback."""
    try:
        return address_towards(_ANY_OUTSIDE)
    except OSError:
        return LOOPBACK


def _prepare(plan: Plan, plan_json: bytes, cluster: str, launcher: Sequence[str]) -> tuple[JobFolder, JobInfo]:
    """The job's folder, with the plan in it; from here on all output goes to its log."""
    job_id = env.slurm_job_id() if cluster == "slurm" else env.get("NVRX_JOB_ID")
    if not job_id:
        hint = "submit it with sbatch" if cluster == "slurm" else "use `nvrx-slurm run`"
        raise UsageError(f"this script has no job id: {hint}")
    folder = JobFolder(Path(plan.folder) / job_id)
    try:
        folder.create()
        print(f"nvrx-slurm: {plan.name}: logs are in {folder.job_log}", flush=True)
        log = open_log(folder.job_log)
    except OSError as error:
        raise UsageError(f"the job folder cannot be written: {error}") from None
    info = _info(plan, folder, cluster, launcher)
    if plan.spares:
        # Nodes that other jobs' evidence blames begin as spares. A job without spares begins on all of them anyway.
        ledger = plan.fault_tolerance.attribution.ledger
        suspects = suspects_among(info.nodes, where=ledger, cluster=cluster_of(info, ledger))
        info = msgspec.structs.replace(info, suspects=suspects)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    folder.remove_result()
    folder.write_plan_json(plan_json)
    folder.write_info(info)
    return folder, info


def _info(plan: Plan, folder: JobFolder, cluster: str, launcher: Sequence[str]) -> JobInfo:
    here = JobInfo(
        job_id=folder.job_id,
        name=plan.name,
        cluster=cluster,
        started_at=SystemClock().wall(),
        host=socket.gethostname(),
        host_pid=os.getpid(),
        host_began=started_ticks(os.getpid()),
        host_boot=boot_id(),
    )
    if cluster == "local":
        addr = default_route_address() if launcher else LOOPBACK  # a launcher may start agents in other networks
        nodes = tuple(f"n{index}" for index in range(1, plan.total_nodes + 1))
        return msgspec.structs.replace(here, addr=addr, nodes=nodes)
    with KillWaitQuestion() as kill_wait:  # asked while scontrol unfolds the list of nodes
        hostnames = subprocess.run(
            ["scontrol", "show", "hostnames", env.slurm_nodelist() or ""],
            capture_output=True, text=True, check=True, timeout=SCONTROL_S,
        )  # fmt: skip
        return msgspec.structs.replace(
            here,
            generation=env.slurm_restart_count(),
            addr=advertised_address(),
            nodes=tuple(hostnames.stdout.split()),  # in Slurm's own order: ranks follow it
            kill_wait_s=kill_wait.answer(timeout_s=KILL_WAIT_ANSWER_S),
        )


@click.command()
@click.option("--cluster", type=click.Choice(["slurm", "local"]), required=True)
@click.argument("launcher", nargs=-1, type=click.UNPROCESSED)
def main(cluster: str, launcher: tuple[str, ...]) -> int:
    """Run a job whose plan comes on standard input; LAUNCHER starts its agents (none: one process a node, here)."""
    if env.take_secrets():
        # They stood in the environment, and /proc/<pid>/environ shows that of a program's start: so start it again.
        # The process keeps its id, and standard input, of which nothing has been read.
        with env.handed_on() as (variables, descriptors):
            for descriptor in descriptors:
                os.set_inheritable(descriptor, True)
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env.child_environment(variables))
    raise_descriptor_limit()
    plan_json = sys.stdin.buffer.read().strip()  # kept as it is: Slurm keeps the job script that it stands in
    try:
        plan = plan_from_json(plan_json)
    except MalformedRecord as error:
        raise UsageError(f"the plan on standard input is not what `nvrx-slurm render` writes: {error}") from None
    folder, info = _prepare(plan, plan_json, cluster, launcher)
    set_up("nvrx-slurm")
    password = env.get(env.STORE_PASSWORD)
    if plan.store.password_file is not None:
        password = secret_in(plan.store.password_file, key="store.password_file").strip()

    async def serve() -> int:
        host = Host(
            plan=plan,
            info=info,
            folder=folder,
            launch=Launch(command=launcher, nodes=info.nodes),
            store_password=password,
            env=env.child_environment({env.PLAN_DIGEST: digest_of_plan(plan_json)}),
            clock=SystemClock(),
        )
        return await host.run()

    return asyncio.run(serve())


if __name__ == "__main__":
    try:
        sys.exit(main(standalone_mode=False))
    except NvrxError as error:
        print(f"nvrx-slurm: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
