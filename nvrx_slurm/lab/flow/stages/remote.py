"""Orders to the machine, or the network, in which a job's processes run.

`python -m nvrx_slurm.lab.flow.stages.remote` reads one order from stdin and writes its result to stdout, as JSON. It
runs beside the job's processes: in a step of the job (`srun --overlap`), or in the network of its batch host.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from nvrx_slurm.cluster.commands import child_environment_for
from nvrx_slurm.errors import FaultFailed, NvrxError
from nvrx_slurm.journal.folder import JobFolder
from nvrx_slurm.journal.records import Record
from nvrx_slurm.lab.flow.stages.processes import FaultAction, FaultResult, apply, write_accounts
from nvrx_slurm.util.clock import Clock, SystemClock
from nvrx_slurm.util.ids import new_secret

ANSWER_S = 5.0


class Revocation(Record, frozen=True, kw_only=True, tag="revocation"):
    """Of the password by which the job in `folder` reaches its store."""

    folder: str


def revoke(order: Revocation, clock: Clock) -> FaultResult:
    """Give the store a new random password.

    Raises FaultFailed, also where a new connection with the old password is let in all the same.
    """
    # Slow to import, and most flows revoke nothing.
    from redis.exceptions import AuthenticationError, RedisError

    from nvrx_slurm.store.redis_client import client

    address = JobFolder(Path(order.folder)).read_store()
    if address is None:
        raise FaultFailed(f"{order.folder} names no store: the job has none now")
    if not address.embedded:
        raise FaultFailed("the store is the site's own, and has other users: leave `store.url` out of job.yaml")
    # Without the mark a refused password counts at once: this process runs on the store's own host.
    address, at = msgspec.structs.replace(address, mark=None), clock.wall()
    try:
        with client(address, connect_s=ANSWER_S, answer_s=ANSWER_S) as store:
            store.execute_command("ACL", "SETUSER", "default", "resetpass", f">{new_secret()}")
    except (RedisError, OSError) as error:
        raise FaultFailed(f"the store at {address.url} did not take another password: {error}") from None
    try:
        with client(address, connect_s=ANSWER_S, answer_s=ANSWER_S) as store:
            store.ping()
    except AuthenticationError as error:
        return FaultResult(at=at, proof=f"the store refuses the old password ({error})")
    raise FaultFailed(f"the store at {address.url} still takes the password that was revoked")


class AccountOrder(Record, frozen=True, kw_only=True, tag="account"):
    """Write down what every process of the job in `folder` does on this node, into files below `out`."""

    folder: str
    out: str
    node: str = ""


Order = FaultAction | Revocation | AccountOrder


class OrderResult(Record, frozen=True, kw_only=True):
    """The result, or why there is none."""

    result: FaultResult | None = None
    error: str | None = None


def carry_out(order: Order, clock: Clock) -> FaultResult:
    """Carry out an order on this machine. Raises FaultFailed."""
    match order:
        case FaultAction():
            return apply(order, clock)
        case Revocation():
            return revoke(order, clock)
        case AccountOrder(folder=folder, out=out, node=node):
            files = asyncio.run(write_accounts(Path(folder), Path(out), node))
            return FaultResult(at=clock.wall(), proof=f"written: {', '.join(map(str, files)) or 'nothing'}")


# How long a step of Slurm may take to start, carry out one order, and end.
REMOTE_S = 20.0

PROGRAM = (sys.executable, "-P", "-m", "nvrx_slurm.lab.flow.stages.remote")


# Has an order carried out on a node, and brings back the result. Raises FaultFailed.
Reach = Callable[[Order, str], FaultResult]


def here(clock: Clock) -> Reach:
    """For a job whose processes all run on this machine."""
    return lambda order, node: carry_out(order, clock)


def by_command(prefix: Callable[[str], Sequence[str]], environment: Mapping[str, str]) -> Reach:
    """By a command that runs what follows it on the node, such as `srun --overlap …`."""

    def reach(order: Order, node: str) -> FaultResult:
        command = [*prefix(node), *PROGRAM]
        try:
            done = subprocess.run(
                command,
                env=child_environment_for(command[0], environment),
                input=msgspec.json.encode(order),
                capture_output=True,
                timeout=REMOTE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            # The words without PROGRAM: how the node was to be reached.
            raise FaultFailed(f"`{' '.join(command[:-4])}` gave no answer in {REMOTE_S:g} s") from None
        try:
            answer = msgspec.json.decode(done.stdout, type=OrderResult)
        except msgspec.DecodeError:
            said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
            raise FaultFailed(f"{node} could not be reached: {said}") from None
        if answer.result is None:
            raise FaultFailed(f"on {node}: {answer.error}")
        return answer.result

    return reach


def overlapping_step(job_id: str) -> Callable[[str], list[str]]:
    """The `srun` by which the user who owns a job runs one more program on one of its nodes, beside all others."""
    step = ("srun", "--overlap", f"--jobid={job_id}", "--nodes=1", "--ntasks=1", "--cpus-per-task=1")
    return lambda node: [*step, f"--nodelist={node}", "--mpi=none", "--quiet"]


def main() -> None:
    """Carry out the order on stdin."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    try:
        answer = OrderResult(result=carry_out(order, SystemClock()))
    except NvrxError as error:
        answer = OrderResult(error=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
