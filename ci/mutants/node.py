"""Mutants of what runs on a node or starts there: the agent's ports, the supervisor, the teardown, a local job."""

from __future__ import annotations

from ci.mutants.model import Edit, Mutant

AGENT, CHILD, SUPERVISOR, WORKERS = (
    "nvrx_slurm/agent/agent.py",
    "nvrx_slurm/agent/child.py",
    "nvrx_slurm/agent/supervisor.py",
    "nvrx_slurm/agent/workers.py",
)
TEARDOWN, JOINING, LOCAL = (
    "nvrx_slurm/agent/teardown.py",
    "nvrx_slurm/agent/joining.py",
    "nvrx_slurm/cluster/local.py",
)


def node(name: str, promise: str, *edits: Edit, tests: tuple[str, ...], flow: str = "") -> Mutant:
    return Mutant(name, promise, edits, tests, flows=(flow,) if flow else ())


def workers(name: str, promise: str, *edits: Edit, test: str) -> Mutant:
    """By one test alone: each of that file starts real processes, and the whole file takes half a minute."""
    return Mutant(name, promise, edits, (f"tests/unit/agent/test_workers.py::{test}",))


NODE = (
    node(
        "teardown-without-kill",
        "a worker that ignores SIGTERM is killed after the grace",
        Edit(TEARDOWN, 'while ORDER[at] != "kill" and', 'while ORDER[at] != "terminate" and'),
        tests=("tests/unit/agent/test_teardown.py",),
        flow="deaf-worker",
    ),
    node(
        "port-not-held",
        "a node's port is held from its report that it is ready to the start of its workers",
        Edit(
            JOINING,
            "        return self.port.number\n",
            "        self.port.release()\n        return self.port.number\n",
        ),
        tests=("tests/unit/agent/test_joining.py",),
    ),
    node(
        "lost-join-not-missed",
        "an agent whose join the store has lost joins again",
        Edit(JOINING, "if not await self._store.has_join_of(incarnation):", "if False:"),
        tests=("tests/unit/agent/test_joining.py",),
    ),
    node(
        "port-free-before-its-user-listens",
        "a node's port stays held while its workers start",
        Edit(
            AGENT,
            "        self.heartbeat.renew()\n        self.watch.begin(",
            "        self.joining.port.release()\n        self.watch.begin(",
        ),
        tests=("tests/unit/agent/test_assignment.py",),
    ),
    workers(
        "leftovers-outlive-the-agent",
        "what a worker has started in a session of its own ends with the agent",
        Edit(
            SUPERVISOR,
            "            send_all(descendants(os.getpid()), signal.SIGKILL)\n            select.select(",
            "            send_all(list(self.workers), signal.SIGKILL)\n            select.select(",
        ),
        test="test_what_left_its_session_ends_with_the_agent",
    ),
    workers(
        "leftovers-outlive-the-lease",
        "what a worker has started in a session of its own ends with the lease",
        Edit(
            SUPERVISOR,
            "            send_all(self._below(), signal.SIGKILL)\n            self.lapsed = True",
            "            send_all(list(self.workers), signal.SIGKILL)\n            self.lapsed = True",
        ),
        Edit(
            SUPERVISOR,
            "            send_all(left, signal.SIGKILL)\n            self.kill_at",
            "            send_all(list(self.workers), signal.SIGKILL)\n            self.kill_at",
        ),
        test="test_what_left_its_session_ends_with_the_lease",
    ),
    workers(
        "leftovers-outlive-the-supervisor",
        "what a worker has started in a session of its own ends with the supervisor",
        Edit(
            WORKERS,
            "            supervisor.send_all(left, signal.SIGKILL)\n",
            "            left and None\n            break\n",
        ),
        test="test_what_left_its_session_ends_with_the_supervisor",
    ),
    workers(
        "worker-outlives-the-supervisor",
        "the kernel kills the workers when their supervisor dies",
        Edit(
            CHILD,
            "        _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)\n        if os.getppid() != parent:",
            "        if os.getppid() != parent:",
        ),
        Edit(CHILD, "        if os.getppid() != parent:", "        if False:"),
        Edit(
            WORKERS,
            "            supervisor.send_all(left, signal.SIGKILL)\n",
            "            left and None\n            break\n",
        ),
        test="test_workers_die_with_their_supervisor",
    ),
    workers(
        "spawn-on-a-lapsed-lease",
        "nothing is started on a lease that has lapsed",
        Edit(SUPERVISOR, "        if not self.may_spawn:\n", "        if False:\n"),
        test="test_nothing_is_started_on_a_lease_that_has_lapsed",
    ),
    workers(
        "lapsed-lease-ignored",
        "workers are killed when their lease lapses",
        Edit(
            SUPERVISOR,
            '        self.lease_until = order["until"]\n',
            "        self.lease_until = time.monotonic() + 30.0\n",
        ),
        test="test_workers_are_killed_when_their_lease_lapses",
    ),
    workers(
        "stopped-worker-not-woken",
        "a stopped worker gets its grace",
        Edit(SUPERVISOR, "    send_all(pids, signal.SIGCONT)  # a stopped one cannot obey\n", ""),
        test="test_stopped_process_is_woken_to_end",
    ),
    node(
        "detached-job-dies-with-its-submitter",
        "a detached local job outlives the process that has submitted it",
        Edit(
            LOCAL,
            "preexec_fn=None if detach else dies_with_parent(signal.SIGTERM),",
            "preexec_fn=dies_with_parent(signal.SIGTERM),",
        ),
        tests=("tests/unit/cluster/test_local.py::test_a_detached_job_outlives_its_submitter",),
    ),
)
