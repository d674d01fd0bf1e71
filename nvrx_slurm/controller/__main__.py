"""`python -m nvrx_slurm.controller`: what the batch host starts, and starts again when it dies."""

from __future__ import annotations

from nvrx_slurm.util import garbage

if __name__ == "__main__":
    garbage.pause()

import asyncio
import gc
import os
import sys

from nvrx_slurm.controller.controller import Controller
from nvrx_slurm.controller.environment import LinuxEnvironment
from nvrx_slurm.errors import NvrxError, UsageError
from nvrx_slurm.jobspec import env
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.store.client import StoreClient
from nvrx_slurm.store.heartbeat_reader import HeartbeatReader
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.files import open_log
from nvrx_slurm.util.log import get_logger, set_up
from nvrx_slurm.util.processes import raise_descriptor_limit

log = get_logger("controller")


async def _serve(folder: JobFolder) -> None:
    info, address = folder.read_info(), folder.read_store()
    if info is None or address is None:
        raise UsageError(f"{folder.path} is not the folder of a running job: job.json or store.json is missing")
    clock = SystemClock()
    store = StoreClient(address, clock=clock, generation=info.generation, look=folder.read_store)
    heartbeats = HeartbeatReader(address, store.keys.beats, clock=clock, look=folder.read_store)
    controller = Controller(
        plan=folder.read_plan(env.plan_digest()),
        info=info,
        environment=LinuxEnvironment(folder, host_descriptor=env.host_descriptor()),
        store=store,
        heartbeats=heartbeats,
        token=address.token,
        bind=info.bind,
        clock=clock,
    )
    gc.collect()
    gc.freeze()  # what is loaded by now stays: no need to walk it again while thousands of beats come in
    try:
        await controller.run()
    finally:
        await heartbeats.close()
        await store.close()


def main() -> None:
    """Run the controller until the job has ended."""
    env.take_secrets()
    raise_descriptor_limit()
    path = env.job_folder()
    if path is None:
        raise UsageError("a controller is started by the job, with NVRX_JOB_FOLDER in its environment")
    folder = JobFolder(path)
    with os.fdopen(open_log(folder.node_log("controller")), "a") as log_file:
        set_up("controller", stream=log_file)
        try:
            asyncio.run(_serve(folder))
        except NvrxError as error:
            log.error("%s", error)
            raise


if __name__ == "__main__":
    garbage.resume()
    try:
        main()
    except NvrxError as error:
        print(f"nvrx-slurm controller: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
