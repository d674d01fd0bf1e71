"""`python -m nvrx_slurm.batch --cluster slurm -- srun … < plan.json`: what the job script ends in."""

from __future__ import annotations

from nvrx_slurm.util import garbage

if __name__ == "__main__":
    garbage.pause()

import asyncio
import contextlib
import ipaddress
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
import msgspec

from nvrx_slurm.attribution.ledger import cluster_of, suspects_among
from nvrx_slurm.batch.ending import EXIT_CODES
from nvrx_slurm.batch.host import Host
from nvrx_slurm.cluster.allocation import refuse_het_job
from nvrx_slurm.cluster.commands import PATIENCE_S, SlurmPrograms, SystemRunner
from nvrx_slurm.cluster.slurm_config import KillWaitQuestion
from nvrx_slurm.errors import EXIT_FAILED, MalformedRecord, NvrxError, UsageError
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.plan import Plan, plan_from_json, plan_to_json
from nvrx_slurm.journal.folder import LOOPBACK, JobFolder, JobInfo, Result, set_earlier_job_aside
from nvrx_slurm.journal.job_index import record_job
from nvrx_slurm.liveness.connection import address_towards
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.files import digest_of_plan, open_log
from nvrx_slurm.util.log import set_up
from nvrx_slurm.util.ownership import login_name
from nvrx_slurm.util.processes import boot_id, raise_descriptor_limit, started_ticks
from nvrx_slurm.util.threads import in_thread

# How long the start of a job may be held up by a slurmctld that does not answer.
KILL_WAIT_ANSWER_S = 5.0

_ANY_OUTSIDE = "10.255.255.255"  # never sent to: it only makes the kernel choose the interface that leads outside


def advertised_address() -> str:
    """The IPv4 address that this host's name stands for; else that of the default route; else loopback."""
    with contextlib.suppress(OSError):
        for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM):
            address = str(entry[4][0])
            # Debian gives the host's own name 127.0.1.1, which leads from another node to that node itself.
            if not ipaddress.ip_address(address).is_loopback:
                return address
    return default_route_address()


def address_for(node: str) -> str:
    """The IPv4 address at which this node reaches this host, which may be a login node with several; else
    `advertised_address`."""
    with contextlib.suppress(OSError):
        address = address_towards(socket.gethostbyname(node))
        if not ipaddress.ip_address(address).is_loopback:
            return address
    return advertised_address()


def address_for_neighbour(node: str) -> str:
    """The same for a node of this host's job. Raises UsageError where only loopback is left, and the node is another
    host."""
    address = address_for(node)
    if ipaddress.ip_address(address).is_loopback:
        found = set()
        with contextlib.suppress(OSError):  # a development cluster's names stand for loopback, or for nothing
            found = {str(entry[4][0]) for entry in socket.getaddrinfo(node, None)}
        if found and not any(ipaddress.ip_address(each).is_loopback for each in found):
            raise UsageError(
                f"{socket.gethostname()} has no IPv4 address at which {node} ({min(found)}) reaches it: its name"
                " stands for none but loopback, and there is no route; give it an entry in /etc/hosts or in DNS"
            )
    return address


def default_route_address() -> str:
    """The IPv4 address of the interface that leads outside; else loopback."""
    try:
        return address_towards(_ANY_OUTSIDE)
    except OSError:
        return LOOPBACK


def _prepare(
    plan: Plan, plan_json: bytes, launcher: Sequence[str], *, cluster: str, allocation: str | None, nodes: str | None
) -> tuple[JobFolder, JobInfo, bytes]:
    """The job's folder, with the plan in it; from here on all output goes to its log. Returns the plan as it is
    there, too: with as many spares as Slurm had."""
    is_slurm_job = cluster == "slurm" and allocation is None
    job_id = env.own_job_id() if is_slurm_job else env.get("NVRX_JOB_ID")
    if not job_id:
        hint = "submit it with sbatch" if is_slurm_job else "use `nvrx-slurm run`"
        raise UsageError(f"this script has no job id: {hint}")
    if cluster == "slurm":
        refuse_het_job()
    folder = JobFolder(Path(plan.folder) / job_id)
    try:
        folder.create()
        # A requeued job goes on in its own folder. What a new job finds there belongs to another of the same id.
        if is_slurm_job and env.slurm_restart_count() == 0 and (aside := set_earlier_job_aside(folder)):
            folder.create()
            print(f"nvrx-slurm: an earlier job had the id {job_id}; its folder is now {aside}")
        with contextlib.suppress(OSError):  # that disk is full; the job's own log may be on another one
            print(f"nvrx-slurm: {plan.name}: logs are in {folder.job_log}", flush=True)
        log = open_log(folder.job_log)
    except OSError as error:
        raise UsageError(f"the job folder cannot be written: {error}") from None
    info = _info(plan, folder, cluster, launcher, allocation, nodes)
    if plan.min_spares is not None and len(info.nodes) >= plan.least_nodes:
        plan = msgspec.structs.replace(plan, spares=len(info.nodes) - plan.active_nodes, min_spares=None)
        plan_json = plan_to_json(plan)
    if plan.spares:
        # Nodes that other jobs' evidence blames begin as spares. A job without spares begins on all of them anyway.
        ledger = plan.fault_tolerance.attribution.ledger
        suspects = suspects_among(info.nodes, where=ledger, cluster=cluster_of(info, ledger))
        info = msgspec.structs.replace(info, suspects=suspects)
    before = folder.read_info() if info.generation else None
    if before is not None:
        info = msgspec.structs.replace(info, left_in_grace=before.left_in_grace)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    if plan.output is not None:
        _link_log(plan.output, folder, plan.name)
    # A result of the generation before would have every reader take the job for ended.
    folder.remove_result()
    folder.write_plan_json(plan_json)
    # The address in job.json says that this process ends the job when it is signalled. Signals wait until it can.
    signal.pthread_sigmask(signal.SIG_BLOCK, EXIT_CODES)
    folder.write_info(info)
    # A job that plain sbatch submitted has no entry yet. Not waited for: the home may not answer on a compute node.
    in_thread(partial(record_job, folder.path, is_new=False), "index")
    return folder, info, plan_json


def _link_log(pattern: str, folder: JobFolder, name: str) -> None:
    """Make the link to the job's log that `output` asks for. An older job's link is replaced, another file is not."""
    known = {
        "%": "%",
        "j": folder.job_id,
        "A": env.get("SLURM_ARRAY_JOB_ID") or folder.job_id,
        "a": env.get("SLURM_ARRAY_TASK_ID") or "4294967294",  # sbatch's own number for "no array"
        "x": name,
        "u": login_name(os.getuid()) or str(os.getuid()),
    }
    link = Path(re.sub("%(.)", lambda match: known.get(match[1], match[0]), pattern))
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_symlink() and link.readlink().name == folder.job_log.name:
            link.unlink()
        link.symlink_to(folder.job_log)
    except OSError as error:  # the job needs no link
        print(f"nvrx-slurm: output {link}: no link to the log is made there: {error.strerror}", flush=True)


def _info(
    plan: Plan, folder: JobFolder, cluster: str, launcher: Sequence[str], allocation: str | None, chosen: str | None
) -> JobInfo:
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
        if allocation is not None and chosen is not None:
            nodes = tuple(chosen.split(","))
            here = msgspec.structs.replace(here, allocation=allocation, addr=address_for(nodes[0]))
        else:
            programs = SlurmPrograms(SystemRunner(), PATIENCE_S)
            hostnames = programs.ask("scontrol", "show", "hostnames", env.slurm_nodelist() or "")
            if not hostnames.ok:
                raise NvrxError(f"scontrol does not say which nodes the job has: {hostnames.reason}")
            nodes = tuple(hostnames.stdout.split())  # in Slurm's own order: ranks follow it
            here = msgspec.structs.replace(here, addr=advertised_address())
        # Debian's /etc/hosts, and no default route: a network of compute nodes alone.
        if len(nodes) > 1 and ipaddress.ip_address(here.addr).is_loopback:
            here = msgspec.structs.replace(here, addr=address_for_neighbour(nodes[-1]))
        return msgspec.structs.replace(
            here,
            generation=env.slurm_restart_count(),
            nodes=nodes,
            kill_wait_s=kill_wait.answer(timeout_s=KILL_WAIT_ANSWER_S),
        )


def _setup_end(status: str, line: str, command: str) -> tuple[int, str]:
    """The job's exit code and its reason. `line`: counted in the lines of `setup`; 0: the shell ended."""
    which = f"line {line} of setup" if int(line) > 0 else "setup"
    code, by = int(status), int(status) - 128
    if by in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        return EXIT_CODES[signal.Signals(by)], f"ended by {signal.Signals(by).name} during {which}: {command}"
    if code == 0:
        return EXIT_FAILED, f"setup ended the job script before the job could start: {command}"
    return EXIT_FAILED, f"{which} failed with exit code {code}: {command}"


@click.command()
@click.option("--cluster", type=click.Choice(["slurm", "local"]), required=True)
@click.option("--allocation", help="The job of Slurm's that holds the nodes, where it was not made for this job.")
@click.option("--nodes", help="Those of its nodes that this job gets.")
@click.option("--failed-setup", nargs=3, help="Only record that a line of setup failed: status, line, command.")
@click.argument("launcher", nargs=-1, type=click.UNPROCESSED)
def main(
    cluster: str,
    allocation: str | None,
    nodes: str | None,
    failed_setup: tuple[str, str, str] | None,
    launcher: tuple[str, ...],
) -> int:
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
    if failed_setup is not None:
        exit_code, reason = _setup_end(*failed_setup)
        print(f"nvrx-slurm: error: {reason}", file=sys.stderr, flush=True)
    folder, info, plan_json = _prepare(plan, plan_json, launcher, cluster=cluster, allocation=allocation, nodes=nodes)
    if failed_setup is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, EXIT_CODES)
        folder.write_result(Result(exit_code=exit_code, reason=reason, ended_at=SystemClock().wall()))
        return exit_code
    asked_nodes, plan = plan.total_nodes, plan_from_json(plan_json)
    set_up("nvrx-slurm")

    async def serve() -> int:
        host = Host(
            plan=plan,
            info=info,
            folder=folder,
            launcher=launcher,
            own_flags=cluster == "slurm" and (allocation is not None or len(info.nodes) != asked_nodes),
            store_password=env.get(env.STORE_PASSWORD),
            env=env.child_environment({env.PLAN_DIGEST: digest_of_plan(plan_json)}),
            clock=SystemClock(),
        )
        return await host.run()

    return asyncio.run(serve())


if __name__ == "__main__":
    garbage.resume()
    try:
        sys.exit(main(standalone_mode=False))
    except NvrxError as error:
        print(f"nvrx-slurm: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
