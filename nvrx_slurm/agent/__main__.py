"""`python -m nvrx_slurm.agent`: what the batch host starts on each node.

Finds the job by `NVRX_JOB_FOLDER`, and its own node's name by `NVRX_NODE` or Slurm's `SLURMD_NODENAME`.
"""

from __future__ import annotations

from nvrx_slurm.util import garbage

if __name__ == "__main__":
    garbage.pause()

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from nvrx_slurm.agent.agent import Agent
from nvrx_slurm.agent.contained import remove_left
from nvrx_slurm.agent.container import CannotStart, find_runtime, label_of
from nvrx_slurm.agent.inside import plan_inside, requeue_from_inside
from nvrx_slurm.agent.linux import LinuxMachine
from nvrx_slurm.agent.log_reader import LogReader
from nvrx_slurm.agent.node_health import NodeHealth
from nvrx_slurm.agent.output import Output
from nvrx_slurm.agent.progress import StepFiles
from nvrx_slurm.agent.stacks import Stacks
from nvrx_slurm.errors import EXIT_UNREACHABLE, NvrxError, UsageError
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.budgets import grace_within
from nvrx_slurm.journal.folder import LOOPBACK, JobFolder, claim_node
from nvrx_slurm.liveness import connection as liveness
from nvrx_slurm.store.client import StoreClient
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.files import open_log
from nvrx_slurm.util.log import get_logger, set_up
from nvrx_slurm.util.processes import raise_descriptor_limit

log = get_logger("agent")


def own_address(batch_host: str, store_host: str) -> str:
    """Where the other agents reach this one: on the network of the store, or of the batch host where the store has no
    IPv4 address, or each node reaches it by a proxy or socket of its own. Raises OSError."""
    if batch_host == LOOPBACK:
        return LOOPBACK
    with contextlib.suppress(socket.gaierror):
        if not ipaddress.ip_address(own := liveness.address_towards(store_host)).is_loopback:
            return own
    return liveness.address_towards(batch_host)


async def _serve(folder: JobFolder, node: str) -> int:
    info, address = folder.read_info(), folder.read_store()
    if info is None or address is None:
        raise UsageError(f"{folder.path} is not the folder of a running job: job.json or store.json is missing")
    store_host = urlsplit(address.url).hostname or LOOPBACK  # a unix socket has none
    clock, plan = SystemClock(), plan_inside(folder.read_plan(env.plan_digest()))
    bounds = plan.fault_tolerance
    runtime, lock = claim_node(folder, node)
    # A full disk hits the logs, the workers, or their libraries (/tmp, /dev/shm).
    needed_folders = [folder.path, Path(plan.workdir), Path("/tmp"), Path("/dev/shm")]
    # Slurm's KillWait bounds the whole end, and the kill and the last facts come after the grace.
    grace_s = bounds.teardown.grace
    ending_grace_s = grace_s if info.kill_wait_s is None else min(grace_s, grace_within(info.kill_wait_s))
    output = Output(job_log=sys.stdout.fileno(), clock=clock)
    agent = Agent(
        plan=plan,
        folder=folder,
        node=node,
        addr=own_address(info.addr, store_host),
        generation=info.generation,
        store=StoreClient(
            address,
            clock=clock,
            generation=info.generation,
            patience_s=bounds.control_plane_grace,
            look=folder.read_store,
        ),
        token=address.token,
        machine=LinuxMachine(
            node=node,
            token=address.token,
            bounds=bounds,
            runtime=runtime,
            lock=lock,
            output=output,
            stacks=Stacks(
                folder,
                runtime / "stacks",
                generation=info.generation,
                inherited=env.child_environment({}),
                clock=clock,
            ),
            health=NodeHealth(node, needed_folders, clock),
            step_files=StepFiles(bounds.progress, clock),
            log_reader=LogReader(node, bounds.attribution, output.wait_drained),
        ),
        clock=clock,
        ending_grace_s=ending_grace_s,
        shares_signals=info.cluster == "slurm",
    )
    try:
        return await agent.run()
    finally:
        inside = {each.runtime: each for role in plan.roles if (each := role.container) is not None}
        for asked, each in inside.items():
            with contextlib.suppress(CannotStart):
                found, program = find_runtime(asked, each.takes, env.search_path())
                if found == "podman":
                    await asyncio.to_thread(remove_left, program, label_of(folder.runtime_name, node))


def main() -> int:
    """Run this node's agent; returns its exit code."""
    env.take_secrets()  # a launcher of the site's may have kept them; workers inherit this environment
    outside = env.outside_descriptor()
    raise_descriptor_limit()
    folder, node = env.job_folder(), env.node_name()
    if folder is None or node is None:
        raise UsageError("an agent is started by the job, with NVRX_JOB_FOLDER and NVRX_NODE in its environment")
    job = JobFolder(folder)
    with os.fdopen(open_log(job.node_log(node)), "a") as log_file:
        set_up(node, stream=log_file)
        exit_code = asyncio.run(_serve(job, node))
        if exit_code == EXIT_UNREACHABLE and (job_id := env.own_job_id()):
            info = job.read_info()
            # Neither an allocation of the user's, nor the job in which the user has started a local one.
            if info is None or (info.cluster == "slurm" and info.allocation is None):
                # The batch host is gone, and a `--no-kill` job outlives it without a purpose: give it back to the
                # queue. Every agent asks; Slurm does it once, and ends the agents with SIGTERM, at times before they
                # have logged its answer.
                before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
                log.error("the job's first node is gone: asking Slurm to requeue job %s", job_id)
                log.info("%s", requeue_from_inside(job_id, outside))
                signal.signal(signal.SIGTERM, before)
        return exit_code


def run() -> NoReturn:
    """Run it, and end as it ends."""
    try:
        sys.exit(main())
    except NvrxError as error:
        print(f"nvrx-slurm agent: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    garbage.resume()
    run()
