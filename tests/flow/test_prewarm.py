"""Warm workers in whole jobs: what happens when the warm process dies, hangs, is out of date or is never ready."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nvrx_slurm.agent.supervisor import descendants, send_all
from nvrx_slurm.jobspec.plan import Plan, RolePlan
from nvrx_slurm.jobspec.prewarm import PrewarmSpec
from nvrx_slurm.journal.records import (
    JobEnded,
    NodeJoined,
    NodeLost,
    Prewarmed,
    PrewarmFailed,
    Progress,
    Recovered,
    RendezvousClosed,
    WorkerFailed,
    WorkersStarted,
)
from nvrx_slurm.util.processes import is_alive
from tests.fault_harness import FrozenNode, supervisor_of
from tests.harness import WAIT_S, Gate, RunningJob, Waiting, plan_of, wait_gone
from tests.ledger import Ledger
from tests.waiting import until

SEEDS = [int(each) for each in os.environ.get("NVRX_TEST_SEEDS", "1 2").split()]
WORKER = Path(__file__).parents[1] / "prewarm_worker.py"
MODEL = """
import os
IMPORTED_BY = os.getpid()
VERSION = 1
"""
STEPPING = "from nvrx_slurm.workload import beat\nbeat(step=1)\ngate = "
"""Replaces `gate = ` in train.py, which then reports a step before it goes to the gate."""
SUPERVISORS_NODE = """
import os
with open(f"/proc/{os.getppid()}/environ", "rb") as file:
    NODE = dict(line.split("=", 1) for line in file.read().decode().split(chr(0)) if "=" in line)["NVRX_NODE"]
"""
"""Sets NODE to the name of a warm process's node, which is in no variable of its own."""


def model(base: Path, text: str = "", name: str = "mymodel") -> None:
    """Write a module beside the workers' script; `text` is what goes wrong in it."""
    (base / f"{name}.py").write_text(MODEL + text)


def warm_plan(
    gate: Gate,
    base: Path,
    *,
    nodes: int = 1,
    spares: int = 0,
    workers: int = 2,
    prewarm: dict[str, Any] | None = None,
    **bounds: Any,
) -> Plan:
    """A job whose workers import `mymodel`, and start from a process that has imported it."""
    shutil.copy(WORKER, base / "train.py")
    if not (base / "mymodel.py").exists():
        model(base)
    role = RolePlan(
        name="main",
        command=(sys.executable, "train.py", str(gate.port), "mymodel"),
        nodes_per_replica=nodes,
        workers_per_node=workers,
        prewarm=PrewarmSpec(**{"imports": ("mymodel",), **(prewarm or {})}),
    )
    return plan_of(base, role, spares=spares, **{"max_restarts": 9, **bounds})


def started_at(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def warm_processes(job: RunningJob, node: str) -> list[int]:
    """The process from which this node's workers are forked, and those that are forked ahead and wait."""
    supervisor = supervisor_of(job.agent_pid(node))
    workers = {pid for record in job.said(WorkersStarted) for pid in record.pids.values()}
    found = []
    for child in descendants(supervisor):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            if child not in workers and any(each.startswith(b"NVRX_WARM_FD=") for each in environment):
                found.append((started_at(child), child))
    return [child for _, child in sorted(found)]


def warm_process(job: RunningJob, node: str) -> int:
    """The process from which this node's workers are forked, once it is ready."""
    job.expect(Prewarmed, node=node)
    found = until(lambda: warm_processes(job, node), f"{node} has no warm process")
    assert found is not None
    return found[0]


def freeze(job: RunningJob, node: str) -> int:
    """Stop a node's warm process, and those that it has forked ahead. Returns the warm process."""
    warm = warm_process(job, node)
    os.kill(warm, signal.SIGSTOP)
    until(lambda: not descendants(warm), "its last fork to be over")
    for each in warm_processes(job, node):
        os.kill(each, signal.SIGSTOP)
    return warm


def sockets_of(pid: int) -> set[str]:
    """The sockets of a process. A supervisor has a new one for each process that it asks a warm process for."""
    links = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.add(str(descriptor.readlink()))
    return {link for link in links if link.startswith("socket:")}


def is_warm(worker: Waiting) -> bool:
    """Whether another process, the warm one, has imported the worker's modules."""
    return int(worker.env["IMPORTED_BY"]) != worker.pid


def started(job: RunningJob, cycle: int, node: str = "n1") -> WorkersStarted:
    return job.expect(WorkersStarted, cycle=cycle, node=node)


def fail(worker: Waiting) -> None:
    """Kill one worker, which restarts its whole replica."""
    os.kill(worker.pid, signal.SIGKILL)


def finish(job: RunningJob, gate: Gate) -> None:
    """Open the gate, and assert that the job ends with 0 and leaves no process, warm ones included."""
    everybody = descendants(job.process.pid)
    gate.open()
    assert job.finish() == 0, job.story()
    wait_gone(everybody)


def warm_again(job: RunningJob, node: str = "n1") -> None:
    """Wait until a second warm process is ready on a node."""
    seen: list[Any] = []

    def second(record: Any) -> bool:
        seen.extend([record] if isinstance(record, Prewarmed) and record.node == node else [])
        return len(seen) == 2

    job.when(second, what="a second warm process")


def reasons(job: RunningJob) -> str:
    """All recorded reasons why a module, or a node, is not warm."""
    skipped = [f"{name}: {why}" for record in job.said(Prewarmed) for name, why in record.skipped.items()]
    return "\n".join([*skipped, *(record.why for record in job.said(PrewarmFailed))])


# ----------------------------------------------------------------------------------------------- all goes well


def test_restarted_workers_are_forked_from_the_warm_process(run_local, gate, tmp_path):
    """Each restarted worker is a process of its own, with its own session and group, runs in the job's folder, and
    has imported nothing itself."""
    job = run_local(warm_plan(gate, tmp_path, nodes=2))
    before = gate.wait(4, cycle=0)
    warm = {warm_process(job, node) for node in ("n1", "n2")}
    fail(before[1])
    after = gate.wait(4, cycle=1)
    assert {int(worker.env["IMPORTED_BY"]) for worker in after.values()} == warm
    assert len({worker.pid for worker in after.values()} | warm) == 6
    assert all(int(worker.env["LEADER"]) == worker.pid for worker in after.values())
    assert {worker.env["FOLDER"] for worker in after.values()} == {str(tmp_path)}
    for node in ("n1", "n2"):
        assert (started(job, 1, node).warm, started(job, 1, node).cold) == (2, None)
    finish(job, gate)
    assert (job.folder.cycle_logs("main-0", 0, 1) / "rank-2.out").read_text() == "rank 2 waits\n"


@pytest.mark.parametrize("prewarm", [None, {"imports": (), "read": ("*.pt",)}], ids=["none", "read alone"])
def test_job_with_nothing_to_import_has_no_warm_process(run_local, gate, tmp_path, prewarm):
    """The workers start cold, and the journal has no record about that."""
    plan = warm_plan(gate, tmp_path, prewarm=prewarm)
    if prewarm is None:
        (role,) = plan.roles
        plan = replace(plan, roles=(replace(role, prewarm=None),))
    job = run_local(plan)
    fail(gate.wait(2, cycle=0)[0])
    after = gate.wait(2, cycle=1)
    assert not any(map(is_warm, after.values()))
    assert (started(job, 1).warm, started(job, 1).cold) == (0, None)
    finish(job, gate)
    assert (job.said(Prewarmed), job.said(PrewarmFailed)) == ([], [])


def test_lost_nodes_workers_start_warm_on_the_spare(run_local, gate, tmp_path):
    """A spare's warm process is ready before it is needed, so that the spare's first workers start warm."""
    job = run_local(warm_plan(gate, tmp_path, nodes=2, spares=1))
    gate.wait(4, cycle=0)
    for node in ("n1", "n2", "n3"):
        warm_process(job, node)
    job.kill_node("n2")
    after = gate.wait(4, cycle=1)
    assert {worker.env["NVRX_NODE"] for worker in after.values()} == {"n1", "n3"}
    assert all(map(is_warm, after.values()))
    assert started(job, 1, "n3").warm == 2
    finish(job, gate)


def test_imports_are_learned_by_the_first_step_for_spares_and_the_next_job_too(run_local, gate, tmp_path):
    """With `auto`, workers start warm from the first step on, also those of a spare that has had no workers."""
    plan = warm_plan(gate, tmp_path, spares=1, prewarm={"imports": "auto"})
    script = tmp_path / "train.py"
    script.write_text(script.read_text().replace("gate = ", STEPPING, 1))
    job = run_local(plan)
    before = gate.wait(2, cycle=0)
    assert not any(map(is_warm, before.values()))
    warm_again(job, "n1")
    fail(before[1])
    assert all(map(is_warm, gate.wait(2, cycle=1).values()))
    warm_again(job, "n2")
    assert len(list(Path(plan.folder).glob(".prewarm/*.json"))) == 1
    job.kill_node("n1")
    assert all(map(is_warm, gate.wait(2, cycle=2).values()))
    finish(job, gate)


def test_imports_are_not_learned_by_the_step_of_another_worker(run_local, gate, tmp_path):
    """One worker writes the list of imports. When another worker reports a step first, that list is not complete yet,
    and is not used."""
    plan = warm_plan(gate, tmp_path, prewarm={"imports": "auto"})
    script, held = tmp_path / "train.py", tmp_path / "held"
    os.mkfifo(held)
    holding = "if os.environ['RANK'] + os.environ['NVRX_CYCLE'] == '00':\n    open('held').close()\nmodule = "
    script.write_text(script.read_text().replace("module = ", holding, 1).replace("gate = ", STEPPING, 1))
    job = run_local(plan)
    gate.wait(1, cycle=0)
    job.expect(Progress, node="n1", rank=1)
    held.write_text("")  # which rank 0 waits for
    before = gate.wait(2, cycle=0)
    warm_again(job)
    fail(before[1])
    assert all(map(is_warm, gate.wait(2, cycle=1).values()))
    finish(job, gate)


def test_restart_does_not_wait_while_a_learned_list_is_tried_out(run_local, gate, tmp_path):
    """With `auto`, each module that no fork may inherit costs one more attempt. A restart meanwhile starts cold,
    which is faster than several attempts."""
    (tmp_path / "refused.py").write_text(REFUSED["threads"][0])
    held = "with open('lock') as lock:\n    open('tried', 'w').close()\n    fcntl.flock(lock, fcntl.LOCK_SH)\n"
    (tmp_path / "held.py").write_text(f"import fcntl\n{held}")
    plan = warm_plan(gate, tmp_path, workers=1, prewarm={"imports": "auto"})
    script, go, tried = tmp_path / "train.py", tmp_path / "go", tmp_path / "tried"
    os.mkfifo(go)
    waiting = "import refused, held\nif os.environ['NVRX_CYCLE'] == '0':\n    open('go').read()\n"
    script.write_text(script.read_text().replace("gate = ", waiting + STEPPING, 1))
    with (tmp_path / "lock").open("w") as lock:
        job = run_local(plan)
        with go.open("w"):  # once the worker has imported all, and before its first step
            fcntl.flock(lock, fcntl.LOCK_EX)
            tried.unlink()
        until(tried.exists, "it is made again, without the module that starts a thread")
        fail(gate.wait(1, cycle=0)[0])
        assert "not ready" in started(job, 1).cold
    gate.wait(1, cycle=1)
    finish(job, gate)


# ---------------------------------------------------------------------------------------- the warm process fails


def test_killed_idle_warm_process_costs_no_worker(run_local, gate, tmp_path):
    """Workers that were forked from the killed warm process run on, and the next workers still start."""
    job = run_local(warm_plan(gate, tmp_path))
    warm = warm_process(job, "n1")
    fail(gate.wait(2, cycle=0)[0])
    forked = gate.wait(2, cycle=1)
    os.kill(warm, signal.SIGKILL)
    wait_gone([warm])
    assert all(is_alive(worker.pid) for worker in forked.values())
    fail(forked[0])
    gate.wait(2, cycle=2)
    record = started(job, 2)
    assert record.warm == 2 or record.cold
    finish(job, gate)
    assert len(job.said(WorkerFailed)) == 2


KILLS = {
    # Registered in the warm process; they run in whichever process forks a worker, and in the worker.
    "the warm process": "os.register_at_fork(before=lambda: TRAP() and os.kill(IMPORTED_BY, 9))",
    "the process between": "os.register_at_fork(before=lambda: TRAP() and os.kill(os.getpid(), 9))",
    "the worker": "os.register_at_fork(after_in_child=lambda: TRAP() and os.kill(os.getpid(), 9))",
}


@pytest.mark.parametrize("victim", KILLS)
def test_killed_just_as_it_forks(run_local, gate, tmp_path, victim):
    """Each rank has one worker, warm or cold, and none of them counts as failed."""
    trap = tmp_path / "trap"
    model(tmp_path, f"TRAP = lambda: os.path.exists({str(trap)!r})\n{KILLS[victim]}\n")
    job = run_local(warm_plan(gate, tmp_path))
    before = gate.wait(2, cycle=0)
    warm_process(job, "n1")
    trap.touch()
    fail(before[1])
    after = gate.wait(2, cycle=1)
    record = started(job, 1)
    assert record.pids == {rank: worker.pid for rank, worker in after.items()}
    assert record.warm == sum(map(is_warm, after.values()))
    assert record.warm == 2 or record.cold
    trap.unlink()
    finish(job, gate)
    assert len(job.said(WorkerFailed)) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_warm_process_that_does_not_fork(run_local, gate, tmp_path, number):
    """A warm process dies or hangs after the order to fork: its node's workers start cold after a bound, those of the
    other node start warm. Continued later, it starts no second worker of a rank."""
    job = run_local(warm_plan(gate, tmp_path, nodes=2))
    before = gate.wait(4, cycle=0)
    warm_process(job, "n2")
    stopped = freeze(job, "n1")
    supervisor = supervisor_of(job.agent_pid("n1"))
    without_order = sockets_of(supervisor)
    fail(before[1])
    assert started(job, 1, "n2").warm == 2
    until(lambda: sockets_of(supervisor) - without_order, "n1 has not asked for workers")
    os.kill(stopped, number)
    after = gate.wait(4, cycle=1, timeout=60.0)
    record = started(job, 1, "n1")
    assert (record.warm, bool(record.cold)) == (0, True)
    with contextlib.suppress(ProcessLookupError):
        os.kill(stopped, signal.SIGCONT)
    wait_gone([stopped])
    assert {worker.pid for worker in gate.wait(4, cycle=1).values()} == {worker.pid for worker in after.values()}
    finish(job, gate)
    assert len(job.said(WorkerFailed)) == 1


def test_killed_fork_that_waited_costs_no_worker(run_local, gate, tmp_path):
    """A process that was forked ahead and dies before it is needed is replaced by another fork."""
    job = run_local(warm_plan(gate, tmp_path))
    before = gate.wait(2, cycle=0)
    warm = warm_process(job, "n1")
    waiting = until(lambda: [pid for pid in warm_processes(job, "n1") if pid != warm], "none is forked ahead")
    os.kill(waiting[0], signal.SIGKILL)
    fail(before[1])
    gate.wait(2, cycle=1)
    assert started(job, 1).warm == 2
    finish(job, gate)


def test_warm_process_that_hangs_does_not_delay_the_end(run_local, gate, tmp_path):
    """A stopped warm process is killed with the rest when the job ends."""
    job = run_local(warm_plan(gate, tmp_path))
    gate.wait(2, cycle=0)
    os.kill(warm_process(job, "n1"), signal.SIGSTOP)
    finish(job, gate)


def test_lost_nodes_workers_start_cold_where_the_spare_is(run_local, gate, tmp_path):
    """The spare's warm process hangs while it warms up: its workers do not wait for it."""
    model(tmp_path, SUPERVISORS_NODE + "if NODE == 'n3':\n    import signal\n    signal.pause()\n", "warmup")
    job = run_local(
        warm_plan(gate, tmp_path, nodes=2, spares=1, prewarm={"imports": ("mymodel", "warmup"), "timeout": 5.0})
    )
    gate.wait(4, cycle=0)
    warm_process(job, "n1")
    job.expect(NodeJoined, node="n3")
    job.agent_pid("n3")
    job.kill_node("n2")
    after = gate.wait(4, cycle=1)
    by_node = {worker.env["NVRX_NODE"]: is_warm(worker) for worker in after.values()}
    assert by_node == {"n1": True, "n3": False}
    assert (started(job, 1, "n3").warm, bool(started(job, 1, "n3").cold)) == (0, True)
    finish(job, gate)


# --------------------------------------------------------------------------------------------- it is out of date


def test_file_edited_between_two_cycles_runs(run_local, gate, tmp_path):
    """The workers of the next cycle run the edited file, and those of the cycle after that are warm again."""
    job = run_local(warm_plan(gate, tmp_path))
    before = gate.wait(2, cycle=0)
    warm = warm_process(job, "n1")
    assert {worker.env["VERSION"] for worker in before.values()} == {"1"}
    model(tmp_path, "VERSION = 2\n")
    fail(before[1])
    after = gate.wait(2, cycle=1)
    assert {worker.env["VERSION"] for worker in after.values()} == {"2"}
    assert started(job, 1).warm == 0
    assert "mymodel.py has changed" in str(started(job, 1).cold)
    warm_again(job)
    assert warm_process(job, "n1") != warm
    fail(after[0])
    again = gate.wait(2, cycle=2)
    assert {worker.env["VERSION"] for worker in again.values()} == {"2"}
    assert started(job, 2).warm == 2
    finish(job, gate)


def test_package_installed_between_two_cycles_runs(run_local, gate, tmp_path):
    """The next cycle runs the new package even where its files are older than the warm process, as a wheel's are."""
    packages = tmp_path / "lib" / "site-packages"

    def install(version: int) -> None:
        packages.mkdir(parents=True, exist_ok=True)
        file = packages / "installed.py"
        file.unlink(missing_ok=True)
        file.write_text(f"VERSION = {version}\n")
        os.utime(file, (1_500_000_000 + version, 1_500_000_000 + version))

    install(1)
    model(tmp_path, f"import sys\nsys.path.append({str(packages)!r})\nfrom installed import VERSION\n")
    job = run_local(warm_plan(gate, tmp_path))
    before = gate.wait(2, cycle=0)
    warm_process(job, "n1")
    install(2)
    fail(before[1])
    after = gate.wait(2, cycle=1)
    assert {worker.env["VERSION"] for worker in before.values()} == {"1"}
    assert {worker.env["VERSION"] for worker in after.values()} == {"2"}
    assert (started(job, 1).warm, f"{packages} has changed" in str(started(job, 1).cold)) == (0, True)
    finish(job, gate)


def test_interpreter_that_is_replaced_between_two_cycles_runs(run_local, gate, tmp_path):
    """No worker is forked from a warm process of the old interpreter."""
    venv.create(tmp_path / "venv", symlinks=False)
    python = tmp_path / "venv" / "bin" / "python"
    plan = warm_plan(gate, tmp_path)
    (role,) = plan.roles
    job = run_local(replace(plan, roles=(replace(role, command=(str(python), *role.command[1:])),)))
    before = gate.wait(2, cycle=0)
    warm_process(job, "n1")
    new = python.with_name("new")
    shutil.copy(python, new)
    new.replace(python)
    fail(before[1])
    gate.wait(2, cycle=1)
    assert (started(job, 1).warm, f"{python} has changed" in str(started(job, 1).cold)) == (0, True)
    warm_again(job)
    finish(job, gate)


def test_file_edited_while_eight_are_forked_ahead(run_local, gate, tmp_path):
    """All eight find out at once that they are out of date: each worker starts cold, and the supervisor lives on."""
    job = run_local(warm_plan(gate, tmp_path, workers=8))
    workers = gate.wait(8, cycle=0)
    for cycle in range(1, 4):
        warm = warm_process(job, "n1")
        supervisor = supervisor_of(job.agent_pid("n1"))
        known = {warm, *(worker.pid for worker in workers.values())}
        until(lambda: len([p for p in descendants(supervisor) if is_of_warm(p) and p not in known]) == 8, "8 wait")  # noqa: B023  called at once
        model(tmp_path, f"VERSION = {cycle}\n" + "#" * cycle)
        fail(workers[cycle])
        workers = gate.wait(8, cycle=cycle)
        assert {worker.env["VERSION"] for worker in workers.values()} == {str(cycle)}
        assert (started(job, cycle).warm, "mymodel.py has changed" in str(started(job, cycle).cold)) == (0, True)
    finish(job, gate)
    assert len(job.said(NodeJoined)) == 1


def test_script_edited_between_two_cycles_runs(run_local, gate, tmp_path):
    """Each worker reads the main script itself, so that a warm worker runs the edited one."""
    job = run_local(warm_plan(gate, tmp_path))
    before = gate.wait(2, cycle=0)
    warm_process(job, "n1")
    script = tmp_path / "train.py"
    script.write_text(script.read_text().replace("module.VERSION}", "module.VERSION}-edited"))
    fail(before[1])
    after = gate.wait(2, cycle=1)
    assert {worker.env["VERSION"] for worker in after.values()} == {"1-edited"}
    assert started(job, 1).warm == 2
    finish(job, gate)


def test_module_edited_into_a_syntax_error_fails_as_ever(run_local, gate, tmp_path):
    """The workers report the syntax error, not the warm process."""
    job = run_local(warm_plan(gate, tmp_path, max_restarts=1))
    before = gate.wait(2, cycle=0)
    warm_process(job, "n1")
    (tmp_path / "mymodel.py").write_text("this is no Python\n")
    fail(before[1])
    assert job.finish() != 0
    # One of the two fails first, and the other is stopped.
    logs = job.folder.cycle_logs("main-0", 0, 1)
    assert any("SyntaxError" in file.read_text() for file in logs.glob("rank-*.err"))


# ------------------------------------------------------------------------------------------ what no fork may have

REFUSED = {
    "threads": ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n", "thread"),
    "RANK": ("import os\nRANK = os.environ.get('RANK')\n", "RANK"),
    "a socket": ("import socket\nSOCKET = socket.create_server(('127.0.0.1', 0))\n", "open"),
    "a process": ("import subprocess\nCHILD = subprocess.Popen(['sleep', '1000'])\n", "process"),
    "an exception": ("raise ValueError('no such device: 7')\n", "no such device: 7"),
    "an exit": ("import sys\nsys.exit('not today')\n", "not today"),
    "a missing module": (None, "peculiar"),
}


def test_modules_that_cannot_be_warm_are_skipped_and_named(run_local, gate, tmp_path):
    """Each module is named with what is wrong with it. Workers start warm with the other modules, and the threads and
    processes of the skipped ones are gone."""
    names = {f"peculiar_{what.replace(' ', '_')}": what for what in REFUSED}
    for name, what in names.items():
        if (text := REFUSED[what][0]) is not None:
            (tmp_path / f"{name}.py").write_text(text)
    job = run_local(warm_plan(gate, tmp_path, prewarm={"imports": (*names, "mymodel")}))
    before = gate.wait(2, cycle=0)
    skipped = job.expect(Prewarmed, node="n1").skipped
    assert list(skipped) == list(names)
    for name, what in names.items():
        assert REFUSED[what][1] in skipped[name], what
    warm = warm_process(job, "n1")
    assert len(list(Path(f"/proc/{warm}/task").iterdir())) == 1
    assert descendants(warm) == []
    fail(before[1])
    assert all(map(is_warm, gate.wait(2, cycle=1).values()))
    finish(job, gate)


def test_shell_that_starts_python_is_cold_and_reported_once(run_local, gate, tmp_path):
    """Over three cycles on two nodes, the journal has one record per node, and each start has the reason."""
    plan = warm_plan(gate, tmp_path, nodes=2, workers=1)
    (role,) = plan.roles
    line = " ".join([*role.command, "& wait $!"])
    job = run_local(
        plan_of(
            tmp_path,
            RolePlan(name="main", command=("bash", "-c", line), nodes_per_replica=2, prewarm=role.prewarm),
            max_restarts=9,
        )
    )
    for cycle in (0, 1):
        workers = gate.wait(2, cycle=cycle)
        assert not any(map(is_warm, workers.values()))
        fail(workers[0])
    gate.wait(2, cycle=2)
    for cycle in (0, 1, 2):
        record = started(job, cycle)
        assert (record.warm, bool(record.cold)) == (0, True)
        assert "no Python program" in str(record.cold)
    finish(job, gate)
    assert sorted(record.node for record in job.said(PrewarmFailed)) == ["n1", "n2"]
    assert job.said(Prewarmed) == []


def test_roles_with_different_interpreters(run_local, gate, tmp_path):
    """Each role's workers are forked from a process of their own interpreter. A role without prewarm starts cold."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    plan = warm_plan(gate, tmp_path, workers=1)
    (main,) = plan.roles
    other = RolePlan(
        name="other",
        command=(str(tmp_path / "venv" / "bin" / "python"), *main.command[1:]),
        nodes_per_replica=1,
        prewarm=main.prewarm,
    )
    off = RolePlan(name="off", command=main.command, nodes_per_replica=1)
    job = run_local(plan_of(tmp_path, main, other, off, spares=1, max_restarts=9))
    roles = ("main", "other", "off")
    nodes = {}
    for role in roles:
        worker = gate.wait(1, cycle=0, replica=f"{role}-0")[0]
        nodes[role] = worker.env["NVRX_NODE"]
    for role in ("main", "other"):
        job.expect(Prewarmed, node=nodes[role], role=role)
    for role in roles:
        fail(gate.wait(1, cycle=0, replica=f"{role}-0")[0])
    after = {role: gate.wait(1, cycle=1, replica=f"{role}-0")[0] for role in roles}
    assert {role: is_warm(worker) for role, worker in after.items()} == {"main": True, "other": True, "off": False}
    assert after["other"].env["PREFIX"] == str(tmp_path / "venv")
    assert after["main"].env["PREFIX"] == sys.prefix
    finish(job, gate)


# ----------------------------------------------------------------------------------------------------- setup

SETUPS = {
    "raises": ("def prepare():\n    raise ValueError('no tokenizer')\n", {}, "no tokenizer"),
    "hangs": ("import signal\ndef prepare():\n    signal.pause()\n", {"timeout": 2.0}, "2"),
    "hangs with signals blocked": (
        "import signal\ndef prepare():\n    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
        "    signal.sigwait([signal.SIGHUP])\n",
        {"timeout": 2.0},
        "2",
    ),
    "grows": (
        "import time\nHELD = []\ndef prepare():\n    while True:\n        HELD.append(b'x' * (16 << 20))\n"
        "        time.sleep(0.01)\n",
        {"memory": 400 << 20},
        "emory",
    ),
    "crashes": ("import os\ndef prepare():\n    os.abort()\n", {}, "SIGABRT"),
    "exits": ("import os\ndef prepare():\n    os._exit(5)\n", {}, "5"),
    "is missing": ("", {}, "prepare"),
}


@pytest.mark.parametrize("how", SETUPS)
def test_setup_that_fails_is_reported_and_costs_nothing_else(run_local, gate, tmp_path, how):
    """The job runs on, and its next workers start, warm without the setup or cold. The reason is in the journal."""
    text, prewarm, word = SETUPS[how]
    (tmp_path / "warmup.py").write_text(text)
    job = run_local(warm_plan(gate, tmp_path, prewarm={"setup": "warmup:prepare", **prewarm}))
    before = gate.wait(2, cycle=0)
    job.when(
        lambda r: isinstance(r, PrewarmFailed) or (isinstance(r, Prewarmed) and bool(r.skipped)),
        what="why there is no setup",
    )
    assert word in reasons(job), reasons(job)
    fail(before[1])
    gate.wait(2, cycle=1)
    record = started(job, 1)
    assert record.warm == 2 or record.cold
    finish(job, gate)
    assert len(job.said(WorkerFailed)) == 1


def test_workers_share_what_setup_has_made(run_local, gate, tmp_path):
    """The setup runs once, in the warm process, and all workers have its result."""
    model(tmp_path, "def prepare():\n    global VERSION\n    VERSION = f'made-by-{os.getpid()}'\n")
    job = run_local(warm_plan(gate, tmp_path, prewarm={"setup": "mymodel:prepare"}))
    before = gate.wait(2, cycle=0)
    warm = warm_process(job, "n1")
    fail(before[0])
    assert {worker.env["VERSION"] for worker in gate.wait(2, cycle=1).values()} == {f"made-by-{warm}"}
    finish(job, gate)


def test_module_larger_than_memory_is_not_warm(run_local, gate, tmp_path):
    """A module that allocates 600 MB at once, where 300 MB are allowed, is named, and is not in the warm process."""
    (tmp_path / "warmup.py").write_text("HELD = b'x' * (600 << 20)\n")
    job = run_local(warm_plan(gate, tmp_path, prewarm={"imports": ("mymodel", "warmup"), "memory": 300 << 20}))
    before = gate.wait(2, cycle=0)
    job.when(
        lambda r: isinstance(r, PrewarmFailed) or (isinstance(r, Prewarmed) and bool(r.skipped)),
        what="why it is not there",
    )
    assert "emory" in reasons(job)
    fail(before[0])
    gate.wait(2, cycle=1)
    for ready in job.said(Prewarmed):
        assert ready.memory_bytes < 300 << 20
    finish(job, gate)


# ---------------------------------------------------------------------------------------- what is around it ends


def test_killed_supervisor_leaves_no_warm_process(run_local, gate, tmp_path):
    """The warm process dies with the workers. The node joins again, and is warm again."""
    job = run_local(warm_plan(gate, tmp_path, spares=0))
    before = gate.wait(2, cycle=0)
    warm = warm_process(job, "n1")
    os.kill(supervisor_of(job.agent_pid("n1")), signal.SIGKILL)
    wait_gone([warm, *(worker.pid for worker in before.values())])
    warm_again(job)
    after = gate.wait(2, cycle=1)
    fail(after[0])
    assert all(map(is_warm, gate.wait(2, cycle=2).values()))
    finish(job, gate)


def test_killed_agent_leaves_no_warm_process(run_local, gate, tmp_path):
    """The supervisor ends the warm process, even a stopped one, and the spare takes the ranks."""
    job = run_local(warm_plan(gate, tmp_path, spares=1))
    before = gate.wait(2, cycle=0)
    warm = warm_process(job, "n1")
    warm_process(job, "n2")
    os.kill(warm, signal.SIGSTOP)
    os.kill(job.agent_pid("n1"), signal.SIGKILL)
    wait_gone([warm, *(worker.pid for worker in before.values())])
    after = gate.wait(2, cycle=1)
    assert {worker.env["NVRX_NODE"] for worker in after.values()} == {"n2"}
    assert all(map(is_warm, after.values()))
    finish(job, gate)
    assert job.said(NodeLost)[0].node == "n1"


def test_cancel_while_it_warms_up(run_local, gate, tmp_path):
    """An import that never ends and ignores SIGTERM does not delay the end of the job."""
    (tmp_path / "warmup.py").write_text(
        "import signal, pathlib\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(tmp_path / 'warms')!r}).touch()\nwhile True:\n    signal.pause()\n"
    )
    job = run_local(warm_plan(gate, tmp_path, prewarm={"imports": ("warmup",)}))
    until((tmp_path / "warms").exists, "it warms up")
    everybody = descendants(job.process.pid)
    began = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 143
    assert time.monotonic() - began < 20.0
    wait_gone(everybody)


def test_workers_wait_for_no_warm_process_for_ever(run_local, gate, tmp_path):
    """With an import that never ends, the first cycle begins cold, after the `timeout` of the prewarm."""
    (tmp_path / "warmup.py").write_text("import signal\nwhile True:\n    signal.pause()\n")
    job = run_local(warm_plan(gate, tmp_path, prewarm={"imports": ("mymodel", "warmup"), "timeout": 3.0}))
    before = gate.wait(2, cycle=0)
    assert not any(map(is_warm, before.values()))
    assert started(job, 0).cold
    assert "3" in job.expect(PrewarmFailed, node="n1").why
    fail(before[0])
    assert len(gate.wait(2, cycle=1)) == 2
    finish(job, gate)


def test_sigterm_to_all_processes_of_the_step(run_local, gate, tmp_path):
    """After a SIGTERM to every process, as Slurm sends it, the workers end as without a warm process, and no process
    is left."""
    job = run_local(warm_plan(gate, tmp_path, nodes=2))
    fail(gate.wait(4, cycle=0)[0])
    warm = [warm_process(job, node) for node in ("n1", "n2")]
    workers = gate.wait(4, cycle=1)
    everybody = descendants(job.process.pid)
    assert set(everybody) > {*warm, *(worker.pid for worker in workers.values())}
    send_all([job.process.pid, *everybody], signal.SIGTERM)
    assert job.finish() == 143
    wait_gone(everybody)
    assert job.said(JobEnded)[0].reason == "cancelled"


def test_signal_between_two_cycles_does_not_kill_the_warm_process(run_local, gate, tmp_path):
    """The signals that stop a cycle's workers do not reach the warm process: the same one serves all cycles."""
    job = run_local(warm_plan(gate, tmp_path))
    warm = None
    for cycle in range(4):
        workers = gate.wait(2, cycle=cycle)
        warm = warm or warm_process(job, "n1")
        assert warm_process(job, "n1") == warm
        fail(workers[cycle % 2])
    gate.wait(2, cycle=4)
    assert len(job.said(Prewarmed)) == 1
    assert started(job, 4).warm == 2
    finish(job, gate)
    assert len(job.said(Recovered)) == 4


# --------------------------------------------------------------------------------------------------- page cache


def test_spare_reads_the_checkpoint_into_its_page_cache(run_local, gate, tmp_path):
    """A spare reads the checkpoint even with nothing to import: no warm process is needed."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "3.pt").write_bytes(b"x" * (2 << 20))
    plan = warm_plan(gate, tmp_path, spares=1, prewarm={"imports": (), "read": ("checkpoints/**",)})
    job = run_local(plan)
    gate.wait(2, cycle=0)
    job.agent_pid("n2")
    log = job.folder.node_log("n2")
    until(lambda: "page cache: read 1 files, 2.0 MiB" in log.read_text(), "the spare reads it")
    job.kill_node("n1")
    gate.wait(2, cycle=1)
    finish(job, gate)


def test_node_at_work_reads_after_a_checkpoint_of_its_ranks(run_local, gate, tmp_path):
    """Of what its ranks have saved, a node reads only the files that its own ranks would read."""
    plan = warm_plan(gate, tmp_path, nodes=2, prewarm={"read": ("rank{rank}.pt",)})
    script = tmp_path / "train.py"
    saves = (
        "import os\nfrom nvrx_slurm.workload import section\n"
        "with section('checkpoint'), open(f'rank{os.environ[\"RANK\"]}.pt', 'wb') as file:\n"
        "    file.write(b'x' * (1 << 20))\n"
    )
    script.write_text(saves + script.read_text())
    job = run_local(plan)
    gate.wait(4, cycle=0)
    for node in ("n1", "n2"):
        log = job.folder.node_log(node)
        until(lambda log=log: "page cache: read 2 files, 2.0 MiB" in log.read_text(), f"{node} reads what it saved")
    finish(job, gate)


# ------------------------------------------------------------------------------------------------- all at random


class Rounds:
    """One random fault per cycle, and random kills of what is forked while the next cycle begins."""

    def __init__(self, job: RunningJob, gate: Gate, chance: random.Random) -> None:
        self.job, self.gate, self.chance = job, gate, chance
        self.spares_left, self.frozen = 2, []
        self.faults = [self.kill_worker, self.kill_warm, self.stop_warm, self.freeze, self.kill_supervisor]

    def strike(self, workers: dict[int, Waiting]) -> str:
        """Inject a random fault on a node of this cycle, and perhaps kill some of the forks that follow."""
        node = self.chance.choice(sorted({worker.env["NVRX_NODE"] for worker in workers.values()}))
        fault = self.chance.choice([*self.faults, *[self.kill_node] * bool(self.spares_left)])
        fault(node, workers)
        deaths = self.chance.randrange(4)
        for _ in range(deaths):
            if forks := self.forks():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.chance.choice(forks), signal.SIGKILL)
        return f"{fault.__name__} {node}, and {deaths}"

    def whole(self, after: int) -> tuple[int, dict[int, Waiting]]:
        """The newest cycle and its workers, once all of them have arrived. A cycle that was killed as it began is
        followed by one more."""
        deadline = time.monotonic() + 2 * WAIT_S
        while True:
            self.job.when(lambda r: isinstance(r, RendezvousClosed) and r.cycle > after, what="a cycle", timeout=60.0)
            cycle = max(record.cycle for record in self.job.said(RendezvousClosed))
            try:
                return cycle, self.gate.wait(4, cycle=cycle, timeout=1.0)
            except AssertionError:
                assert time.monotonic() < deadline, self.job.story()
                with contextlib.suppress(AssertionError):  # read on
                    self.job.when(lambda _: False, what="more of the journal", timeout=0.2)

    def forks(self) -> list[int]:
        """Every warm process, and every process that was forked from one."""
        return [pid for pid in descendants(self.job.process.pid) if is_of_warm(pid)]

    def warm(self, node: str) -> int | None:
        """The node's warm process: the first that its supervisor has started."""
        found = [pid for pid in descendants(supervisor_of(self.job.agent_pid(node))) if is_of_warm(pid)]
        workers = {pid for record in self.job.said(WorkersStarted) for pid in record.pids.values()}
        return next((pid for pid in found if pid not in workers), None)

    def thaw_all(self) -> None:
        for node in self.frozen:
            order = ["agent", "supervisor", "workers"]
            self.chance.shuffle(order)
            node.thaw(tuple(order))
        self.frozen.clear()

    def kill_worker(self, node: str, workers: dict[int, Waiting]) -> None:
        fail(self.chance.choice([worker for worker in workers.values() if worker.env["NVRX_NODE"] == node]))

    def kill_warm(self, node: str, workers: dict[int, Waiting]) -> None:
        if (warm := self.warm(node)) is not None:
            os.kill(warm, signal.SIGKILL)
        self.kill_worker(node, workers)

    def stop_warm(self, node: str, workers: dict[int, Waiting]) -> None:
        if (warm := self.warm(node)) is not None:
            os.kill(warm, signal.SIGSTOP)
        self.kill_worker(node, workers)

    def freeze(self, node: str, workers: dict[int, Waiting]) -> None:
        self.frozen.append(FrozenNode(self.job, node))

    def kill_supervisor(self, node: str, workers: dict[int, Waiting]) -> None:
        os.kill(supervisor_of(self.job.agent_pid(node)), signal.SIGKILL)

    def kill_node(self, node: str, workers: dict[int, Waiting]) -> None:
        self.spares_left -= 1
        self.job.kill_node(node)


def is_of_warm(pid: int) -> bool:
    """Whether it is a warm process or was forked from one: the kernel's copy of its environment says so."""
    with contextlib.suppress(OSError):
        return b"NVRX_WARM_FD=" in Path(f"/proc/{pid}/environ").read_bytes()
    return False


@pytest.mark.parametrize("seed", SEEDS)
def test_no_rank_is_ever_held_twice(run_local, gate, tmp_path, seed):
    """Under random kills, stops and freezes, each rank has one live worker at a time, and the job goes on."""
    ledger = Ledger(tmp_path / "ledger")
    bounds = {"heartbeat__interval": 0.2, "heartbeat__timeout": 4.0, "heartbeat__startup_timeout": 20.0}
    plan = ledger.plan(gate, spares=3, max_restarts=99, **bounds)
    (role,) = plan.roles
    command = tuple(word for word in role.command if word != "-S")
    # A warm process that is stopped while it imports delays its workers for that long.
    warm = replace(role, command=command, prewarm=PrewarmSpec(imports=("select", "json"), timeout=20.0))
    job = run_local(replace(plan, roles=(warm,)))
    rounds, happened = Rounds(job, gate, random.Random(seed)), []
    for node in ("n1", "n2", "n3", "n4", "n5"):
        job.expect(Prewarmed, node=node)
    cycle, workers = rounds.whole(-1)
    for _ in range(6):
        happened.append(rounds.strike(workers))
        cycle, workers = rounds.whole(cycle)
        rounds.thaw_all()
    print(happened, [(r.cycle, r.node, r.warm, r.cold) for r in job.said(WorkersStarted)])
    gate.open()
    assert job.finish() == 0, happened
    ledger.check()
    assert sum(record.warm for record in job.said(WorkersStarted)) > 0
