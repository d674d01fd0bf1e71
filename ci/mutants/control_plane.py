"""Mutants of the control plane: core, controller, store scripts, and what an agent does with leases and orders.

Each is tried against the simulation as well as against its unit tests.
"""

from __future__ import annotations

from ci.mutants.model import ROOT, Edit, Mutant

CORE = "nvrx_slurm/core"
JOB, STATE, LIMITS, LIVENESS = (f"{CORE}/{name}.py" for name in ("job", "state", "limits", "liveness"))
MEMBERSHIP, RENDEZVOUS = f"{CORE}/membership.py", f"{CORE}/rendezvous.py"
DECISION, RESTART = f"{CORE}/restart_decision.py", f"{CORE}/restart.py"
REQUESTS = f"{CORE}/requests.py"
CONTROLLER = "nvrx_slurm/controller/controller.py"
CLIENT = "nvrx_slurm/store/client.py"
DETECTOR = "nvrx_slurm/controller/failure_detector.py"
COMMIT, JOIN = "nvrx_slurm/store/lua/commit.lua", "nvrx_slurm/store/lua/join.lua"
AGENT, HEARTBEAT, JOINING = (f"nvrx_slurm/agent/{name}.py" for name in ("agent", "heartbeat", "joining"))

OF_REQUESTS = ("tests/unit/core/test_requests.py",)
SLOW = ("tests/unit/core/test_history.py",)
OF_CORE = tuple(
    file
    for file in sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/unit/core/test_*.py"))
    if file not in OF_REQUESTS + SLOW
)
OF_LIVENESS = ("tests/unit/core/test_liveness.py", "tests/unit/controller")
OF_CONTROLLER = ("tests/unit/controller",)
OF_STORE = ("tests/contract/test_store.py",)

# What the simulation has not seen within 500 seeds (`python -m ci.mutants --by simulation` tries these too); a full
# run leaves them to their unit tests. `commit-with-a-gap`: no fault of the simulation takes entries out of the store.
# The others need two faults within a fraction of a second, which came once in thousands of seeds.
BEYOND_SIMULATION = frozenset(
    {
        "commit-with-a-gap",
        "epoch-given-twice",
        "lapsed-lease-counts-again",
        "late-fence-proves-too-early",
        "late-orders-of-a-dead-controller-unmarked",
        "silence-of-an-old-answer",
        "symptom-settled-by-another-replica",
    }
)


def core(name: str, promise: str, *edits: Edit, flows: tuple[str, ...] = ()) -> Mutant:
    """One that the core's unit tests must see."""
    return Mutant(name, promise, edits, OF_CORE, simulated="job", flows=flows)


def controller(
    name: str, promise: str, *edits: Edit, tests: tuple[str, ...] = OF_CONTROLLER, flows: tuple[str, ...] = ()
) -> Mutant:
    """One of the runtimes around the core."""
    return Mutant(name, promise, edits, tests, simulated="job", flows=flows)


def request(name: str, promise: str, *edits: Edit) -> Mutant:
    """One of what users ask for."""
    return Mutant(name, promise, edits, OF_REQUESTS, simulated="job")


CONTROL_PLANE = (
    # ---- what users ask for
    request(
        "user-restart-spends-the-budget",
        "a user's restart is no failure, and no budget counts it",
        Edit(
            REQUESTS,
            "            decisions += [ordered, *rendezvous",
            "            replica.restarted_at.append(now)\n            decisions += [ordered, *rendezvous",
        ),
    ),
    request(
        "late-restart-acts",
        "a restart of a cycle that is over is refused",
        Edit(REQUESTS, "elif replica.cycle != cycle:", "elif False:"),
    ),
    request(
        "request-acts-twice",
        "a request that arrives twice is answered once",
        Edit(REQUESTS, "if fact.request in job.requests:", "if False:"),
    ),
    request(
        "drained-node-gets-ranks",
        "a drained node gets no ranks",
        Edit(RENDEZVOUS, "    if node.name in job.drained:\n        membership", "    if False:\n        membership"),
    ),
    request(
        "drain-takes-anothers-spare",
        "a drain needs a spare that no open rendezvous lacks",
        Edit(REQUESTS, "max(0, replica.role.nodes_per_replica - left)", "0"),
    ),
    request(
        "drain-ends-the-job",
        "a drain is taken back when the spare is lost before it has the ranks",
        Edit(RENDEZVOUS, "if missing <= spared or node.state is not NodeState.DRAINED:", "if True:"),
    ),
    # ---- what the cause is
    core(
        "symptom-as-cause",
        "a lost connection to a peer is not the cause of a failure",
        Edit(JOB, "        peer_lost=fact.peer_lost,\n", "        peer_lost=False,\n"),
    ),
    core(
        "cause-by-report",
        "of two causes the one that happened first counts",
        Edit(
            f"{CORE}/cause.py",
            "return _order(failure) < _order(known)",
            "return _order(failure)[0] <= _order(known)[0]",
        ),
    ),
    core(
        "cause-without-bound",
        "what happens long after the first report did not cause it",
        Edit(f"{CORE}/cause.py", "WITHIN_S = 10.0", "WITHIN_S = 1e9"),
    ),
    core(
        "symptom-spends-the-budget",
        "a decision about a symptom waits for the end of the rendezvous",
        Edit(DECISION, "(is_symptom or limits.judges_progress(job))", "limits.judges_progress(job)"),
    ),
    core(
        "hang-as-cause",
        "a node without power is the cause of its peers' hang, also where they are found first",
        Edit(f"{CORE}/cause.py", 'if known.hung and failure.kind == "node" and', "if False and"),
    ),
    # ---- who gets which ranks, and when
    core(
        "spare-not-promoted",
        "a spare takes a dead node's ranks",
        Edit(RENDEZVOUS, "here - unwanted, spares, want)", "here - unwanted, [], want)"),
        flows=("spare-takes-over",),
    ),
    core(
        "ranks-before-proof",
        "ranks wait until the old workers are proven dead",
        Edit(
            RENDEZVOUS,
            "    replica.unsafe = {name: at for name, at in replica.unsafe.items() if now < at}\n",
            "    replica.unsafe = {}\n",
        ),
        flows=("frozen-node",),
    ),
    core(
        "late-node-without-proof",
        "a late node's ranks wait for the proof of its death",
        Edit(RENDEZVOUS, "    dead_by = now + job.plan.fault_tolerance.gives_away_after_s\n", "    dead_by = now\n"),
    ),
    core(
        "last-call-without-grace",
        "a spare does not overtake a node that is within its teardown's grace",
        Edit(RENDEZVOUS, "(bounds.teardown.grace if replica.cycle else 0.0)", "0.0"),
    ),
    core(
        "one-node-too-few",
        "no cycle runs with fewer than min_nodes",
        Edit(RENDEZVOUS, "have >= role.min_nodes:", "have + 1 >= role.min_nodes:"),
    ),
    core(
        "min-nodes-not-enough",
        "a rendezvous closes with min_nodes when no more can come",
        Edit(RENDEZVOUS, "have >= role.min_nodes:", "have > role.min_nodes:"),
    ),
    core(
        "join-timeout-ignored",
        "a rendezvous ends within its join timeout",
        Edit(RENDEZVOUS, "if more_may_come and not overdue:", "if more_may_come:"),
    ),
    core(
        "quarantine-one-late",
        "a node that was lost quarantine_after times gets no ranks",
        Edit(JOB, "    if node.deaths >= limit:\n", "    if node.deaths > limit:\n"),
    ),
    core(
        "deaths-not-counted",
        "each loss of a node counts for its quarantine",
        Edit(JOB, "        node.deaths += 1\n", "        pass\n"),
    ),
    core(
        "replaced-agent-not-lost",
        "a node whose agent joins again has lost its workers",
        Edit(JOB, "    if known is not None and known.alive:\n", "    if known is not None and False:\n"),
    ),
    core(
        "back-node-not-safe",
        "a node that joins again proves that its old workers are dead",
        Edit(
            MEMBERSHIP,
            "    make_safe(job, node)\n    node.replica = None\n",
            "    node.replica = None\n",
        ),
    ),
    core(
        "proof-of-another-agent",
        "the proof of another agent's death is no proof",
        Edit(
            JOB,
            "    if node is None or node.incarnation != fact.incarnation:\n        return None\n    return [] if",
            "    if node is None:\n        return None\n    return [] if",
        ),
    ),
    core(
        "replica-done-too-early",
        "a replica is done when all of its nodes are",
        Edit(
            JOB,
            "    if not replica.done.issuperset(replica.order):\n        return []\n    replica.phase",
            "    replica.phase",
        ),
    ),
    # ---- what is believed
    core(
        "stale-record-accepted",
        "a fact of an older agent, cycle or sequence number has no effect",
        Edit(
            MEMBERSHIP,
            " or fact.incarnation != node.incarnation:\n        return None\n    ret",
            ":\n        return None\n    ret",
        ),
        Edit(MEMBERSHIP, "return node if fact.seq > node.seq else None", "return node"),
        Edit(
            JOB,
            "return replica if replica.phase is Phase.RUNNING and replica.cycle == cycle else None",
            "return replica",
        ),
        flows=("two-failures-one-restart",),
    ),
    core(
        "older-cycle-accepted",
        "a fact of an older cycle has no effect",
        Edit(
            JOB,
            "return replica if replica.phase is Phase.RUNNING and replica.cycle == cycle else None",
            "return replica if replica.phase is Phase.RUNNING else None",
        ),
    ),
    core(
        "fact-counts-twice",
        "a fact that arrives twice counts once",
        Edit(MEMBERSHIP, "fact.seq > node.seq else", "fact.seq >= node.seq else"),
    ),
    core(
        "older-generation-accepted",
        "a fact of an older generation has no effect",
        Edit(MEMBERSHIP, "if node is None or fact.generation != job.generation or", "if node is None or"),
        Edit(
            MEMBERSHIP,
            "    if fact.generation != job.generation:\n        return False\n    if node is None:\n",
            "    if node is None:\n",
        ),
    ),
    core(
        "join-of-older-generation",
        "an agent of an older generation does not join this one",
        Edit(
            MEMBERSHIP,
            "    if fact.generation != job.generation:\n        return False\n",
            "    if fact.generation > job.generation:\n        return False\n",
        ),
    ),
    core(
        "signal-of-older-generation",
        "a signal to an older generation does not end this one",
        Edit(
            JOB, "if job.shutdown is not None or fact.generation != job.generation:", "if job.shutdown is not None:"
        ),
    ),
    core(
        "former-agent-joins",
        "a join of an agent that was replaced is refused",
        Edit(
            MEMBERSHIP,
            "return not known and not precedes(fact.incarnation, node.incarnation)",
            "return fact.incarnation != node.incarnation",
        ),
    ),
    # ---- restarts, budgets, verdicts
    core(
        "restarts-not-counted",
        "the restart budget is kept",
        Edit(DECISION, "    times.append(now)\n", ""),
        flows=("crash-loop",),
    ),
    core(
        "shared-restart-budget",
        "each replica has a restart budget of its own",
        Edit(
            LIMITS,
            "left = [bounds.max_restarts.left(replica.restarted_at, now)]",
            "left = [bounds.max_restarts.left(_of_all(job), now)]",
        ),
        Edit(
            LIMITS,
            "if not own.left(replica.restarted_at, now):",
            "if not own.left(_of_all(job), now):",
        ),
    ),
    core(
        "job-budget-ignored",
        "the job's own restart budget is kept",
        Edit(
            LIMITS, "if whole is not None and not whole.left(", "if False and whole is not None and not whole.left("
        ),
    ),
    core(
        "rate-never-forgets",
        "a rate forgets what is older than its period",
        Edit(
            "nvrx_slurm/jobspec/values.py",
            "if self.per_s is None else sum(now - self.per_s < at for at in times)",
            "",
        ),
    ),
    Mutant(
        "rate-counts-a-suspension",
        "a rate of failures does not count the time of a suspension",
        (
            Edit(
                f"{CORE}/suspension.py",
                "        replica.restarted_at = [at + by_s for at in replica.restarted_at]\n",
                "",
            ),
        ),
        ("tests/unit/core/test_suspension.py",),
        simulated="job",
    ),
    core(
        "lost-node-spends-restarts",
        "lost nodes and failed workers are counted apart",
        Edit(
            DECISION, "times = job.nodes_lost_at if is_node else replica.restarted_at", "times = replica.restarted_at"
        ),
    ),
    core(
        "preemptions-not-bounded",
        "a job is requeued at most max_preemptions times",
        Edit(JOB, "        if spent := limits.preemptions_spent(job, now):", "        if False and (spent := ''):"),
    ),
    core(
        "one-failure-restarts-all",
        "one replica's failure restarts that replica alone",
        Edit(
            RESTART,
            "if other.id in restarted:",
            "if other.id in restarted or other.phase is Phase.RUNNING:",
        ),
        flows=("roles-*",),
    ),
    core(
        "no-pause-in-a-crash-loop",
        "restarts in a crash loop are spaced by the back-off",
        Edit(LIMITS, "    return float(min(plan.max, plan.initial * 2**doubled))", "    return 0.0 * doubled"),
    ),
    core(
        "never-stuck",
        "a job without progress ends",
        Edit(LIMITS, "or replica.no_progress < bounds.max_no_progress_cycles:", "or True:"),
    ),
    core(
        "exit-skew-from-the-start",
        "nodes have exit_skew from the first end on to finish as well",
        Edit(RESTART, "return replica.first_done_at + skew_s", "return replica.began_at + skew_s"),
    ),
    core(
        "exit-skew-ignored",
        "nodes that run on after others have finished are hung after exit_skew",
        Edit(RESTART, "not job.is_over(due_at, now):", "not job.is_over(due_at + 3600.0, now):"),
    ),
    core(
        "no-wait-for-a-verdict",
        "a rendezvous waits for the verdict until the decision timeout",
        Edit(DECISION, "if not pending.waits or job.is_over", "if True or job.is_over"),
        flows=("attribution-service-changes-its-mind",),
    ),
    core(
        "late-stop-ends-the-job",
        "a verdict that is too late changes nothing",
        Edit(DECISION, "    if pending.decided or not pending.waits or", "    if not pending.waits or"),
        flows=("attribution-service-late",),
    ),
    core(
        "dry-run-acts",
        "in a dry run no verdict ends the job",
        Edit(DECISION, "waits = restarts and settings.acts", "waits = restarts and bool(settings.sources)"),
    ),
    core(
        "any-for-all",
        "aggregation: any ends with one STOP, all with every one",
        Edit(DECISION, 'if stopping and (how == "any" or', 'if stopping and (how == "all" or'),
        Edit(DECISION, 'if how == "any" else', 'if how == "all" else'),
    ),
    core(
        "stale-verdict-counts",
        "a verdict counts for its own cycle only",
        Edit(
            JOB,
            "    pending = job.restart_decisions.get((fact.replica, fact.cycle)) if fact.generation == job.generation"
            " else None\n    if pending is None or pending.failure.rank != fact.rank or",
            "    pending = next((each for each in reversed(job.restart_decisions.values())"
            " if each.replica == fact.replica), None)\n    if pending is None or",
        ),
    ),
    # ---- how a job ends
    core(
        "later-shutdown-wins",
        "the first shutdown is the only one",
        Edit(JOB, "if job.shutdown is not None or fact.generation", "if fact.generation"),
        Edit(
            JOB,
            "    if job.shutdown is None:\n        job.shutdown = _shutdown_in(decisions)\n",
            "    job.shutdown = _shutdown_in(decisions) or job.shutdown\n    if not job.ended:\n",
        ),
        flows=("first-reason-wins",),
    ),
    core(
        "ends-before-all-have-left",
        "a job ends when every node has left, or its time to leave is up",
        Edit(JOB, "if job.is_over(job.shutdown_deadline, now) or", "if True or"),
    ),
    core(
        "reap-without-fence",
        "a node that is given up is fenced",
        Edit(JOB, "return [fence, *_depart(", "return [*_depart("),
        flows=("frozen-node",),
    ),
    # ---- who is dead
    controller(
        "no-startup-guard",
        "a new controller declares no node dead before it has listened for a full timeout",
        Edit(DETECTOR, "grace_until=clock.monotonic() + bounds.heartbeat.timeout", "grace_until=0.0"),
        tests=OF_LIVENESS,
    ),
    controller(
        "broken-connection-is-a-death",
        "a broken liveness connection alone is no death",
        Edit(DETECTOR, "        if proven:\n            self._l", "        if True:\n            self._l"),
        tests=OF_LIVENESS,
    ),
    controller(
        "suspect-not-cleared",
        "a suspected node whose heartbeats arrive is not reaped",
        Edit(LIVENESS, "        if self._suspected and at > self._suspected.get(node, at):\n", "        if False:\n"),
        tests=OF_LIVENESS,
    ),
    controller(
        "silence-of-an-old-answer",
        "a node's silence is judged as of when the heartbeats were asked for",
        Edit(DETECTOR, "self.liveness.dead(asked_at)", "self.liveness.dead(now)"),
    ),
    controller(
        "silence-of-all-is-a-death",
        "when all nodes fall silent at once none is reaped",
        Edit(LIVENESS, "if late and self._stall_s < now", "if False and self._stall_s < now"),
        tests=OF_LIVENESS,
    ),
    controller(
        "never-reaped",
        "a silent node is reaped after heartbeat.timeout",
        Edit(LIVENESS, "else heard + self._timeout_s\n", "else heard + 100 * self._timeout_s\n"),
        tests=OF_LIVENESS,
    ),
    controller(
        "known-nodes-not-watched",
        "a node that died with the controller is given up within the heartbeat timeout",
        Edit(DETECTOR, "            self.liveness.heard(node.name, self.clock.monotonic())\n\n", "\n"),
    ),
    controller(
        "node-of-older-generation-watched",
        "a controller watches no node that the job had in its last generation alone",
        Edit(CONTROLLER, "        if has_begun:  # else these nodes", "        if True:  # else these nodes"),
    ),
    controller(
        "older-generations-forgotten",
        "each controller of a requeued job knows the generations before, also with a fresh store",
        Edit(CONTROLLER, "if kept and len(journal) < self.written:", "if kept and not journal:"),
    ),
    # ---- one decider, journal first
    controller(
        "older-epoch-commits",
        "no commit of an older epoch is accepted",
        Edit(COMMIT, "if newest ~= mine then", "if newest < mine then"),
        tests=OF_STORE,
    ),
    controller(
        "commit-twice",
        "a commit whose reply was lost is executed once",
        Edit(COMMIT, "if entries > 0 and first <= last then", "if false then"),
        tests=OF_STORE,
    ),
    controller(
        "commit-with-a-gap",
        "the journal has no gap",
        Edit(COMMIT, "if entries > 0 and first ~= last + 1 then", "if false then"),
        tests=OF_STORE,
    ),
    controller(
        "join-twice",
        "a join whose reply was lost is executed once",
        Edit(JOIN, "== 1 then", ">= 0 then"),
        tests=OF_STORE,
    ),
    controller(
        "journal-after-act",
        "an order is in the journal before it is carried out",
        Edit(
            CONTROLLER,
            "        server_time = await self.store.commit(\n            self.epoch,\n            batch.entries,",
            "        due, self.unwritten = getattr(self, 'unwritten', []), batch.entries\n"
            "        server_time = await self.store.commit(\n            self.epoch,\n            due,",
        ),
        flows=("controller-killed-in-a-rendezvous",),
    ),
    controller(
        "unread-inbox-skipped",
        "a new controller takes in what was said while no controller ran",
        Edit(
            CONTROLLER,
            "                if fact is not None:\n                    self.queue",
            "                if fact is not None and since is not None:\n                    self.queue",
        ),
    ),
    controller(
        "no-shutdown-order",
        "every agent receives the shutdown order",
        Edit(
            CONTROLLER,
            "    Shutdown,\n    Fence,\n    JobSuspended,\n    DumpOrdered",
            "    Fence,\n    JobSuspended,\n    DumpOrdered",
        ),
        tests=(*OF_CONTROLLER, "tests/unit/lab/simulation/test_run.py"),
        flows=("happy-path", "success-while-a-spare-waits"),
    ),
    controller(
        "deadline-before-the-inbox",
        "no deadline is judged before the facts that arrived in time are read",
        Edit(CONTROLLER, "if await self._has_read_all() and self.queue.empty() else []", "if True else []"),
    ),
    core(
        "deadline-in-the-backlog",
        "no deadline is judged before a new controller has taken in what was said while none ran",
        Edit(STATE, "return now >= deadline and not self.catches_up", "return now >= deadline"),
    ),
    core(
        "symptom-settled-by-another-replica",
        "a symptom is no cause while nodes of replicas that restart together are awaited",
        Edit(DECISION, "pending.holds if pending.is_symptom else ", ""),
    ),
    core(
        "late-order-shortens-the-time",
        "nodes that learn late of a rendezvous have all of their time for it",
        Edit(JOB, "            replica.called_at, replica.last_call_at = now, None\n", "            pass\n"),
    ),
    core(
        "late-fence-proves-too-early",
        "ranks are given away only when the workers of a node that was fenced late must be dead",
        Edit(JOB, "at + late_s if at >= fenced_by else at", "at"),
    ),
    core(
        "agents-stay-when-data-are-lost",
        "after a loss of the store's data all agents join again",
        Edit(
            JOB,
            "        if node.alive:\n            decisions.append(rendezvous.give_up(",
            "        if False:\n            decisions.append(rendezvous.give_up(",
        ),
    ),
    core(
        "lapsed-lease-counts-again",
        "a lease that lapsed before the store lost its data is not waited for once more",
        Edit(RENDEZVOUS, "now < replica.unsafe.get(node.name, now)", "node.name in replica.unsafe"),
    ),
    controller(
        "epoch-given-twice",
        "no two controllers have the same epoch, also after a loss of the store's data",
        Edit(CONTROLLER, "max(epochs, default=0) + unknown", "max(epochs, default=0)"),
    ),
    controller(
        "late-orders-unmarked",
        "nodes that learn late of a rendezvous have all of their time for it",
        Edit(CONTROLLER, "return [InboundFact(DecisionsLate(since=since))]", "pass"),
    ),
    controller(
        "late-orders-of-a-dead-controller-unmarked",
        "nodes that learn late of a rendezvous have all of their time for it, under the next controller too",
        Edit(CONTROLLER, "facts[:0] = _unmarked(dated)", "pass"),
    ),
    controller(
        "time-of-reading",
        "a fact counts from its arrival in the store",
        Edit(
            CONTROLLER, "            if item.inbox_id:\n                #", "            if False:\n                #"
        ),
    ),
    # ---- the agent's part: leases and orders
    controller(
        "lease-renewed-out-of-touch",
        "workers' lease lapses when neither store nor controller answers",
        Edit(HEARTBEAT, "self._bounds.fence_timeout - self._out_of_touch_s()))", "self._bounds.fence_timeout))"),
        tests=("tests/unit/agent/test_heartbeat.py::test_lease_runs_out_while_nobody_answers",),
    ),
    controller(
        "start-out-of-touch",
        "an agent that was partitioned starts no workers before it is in touch again",
        Edit(AGENT, "        if not self.heartbeat.is_in_touch:\n", "        if False:\n"),
        tests=("tests/unit/agent/test_assignment.py",),
    ),
    controller(
        "ranks-of-a-former-incarnation",
        "an agent takes no ranks that were given to its former incarnation",
        Edit(AGENT, "        if event.asked_by != self.publisher.incarnation:\n", "        if False:\n"),
        tests=("tests/unit/agent/test_assignment.py",),
    ),
    controller(
        "answer-before-older-orders",
        "an answer about a rendezvous comes after all older orders",
        Edit(JOINING, "        while self._last < place_of(newest):\n", "        while False:\n"),
        tests=("tests/unit/agent/test_joining.py",),
    ),
    controller(
        "any-proof-accepted",
        "nothing is believed that is not signed with the job's key",
        Edit("nvrx_slurm/util/job_key.py", "    return hmac.compare_digest(expected, given)", "    return True"),
        tests=("tests/unit/liveness/test_connection.py", "tests/unit/util/test_job_key.py"),
    ),
    controller(
        "copied-order-acts",
        "an order that is copied to the end of the stream has no effect",
        Edit("nvrx_slurm/store/sealing.py", "    if number <= passed:\n", "    if False:\n"),
        tests=OF_STORE,
    ),
    controller(
        "orders-of-an-earlier-clock-unread",
        "agents read the orders of a store that has lost its data and whose clock is behind",
        Edit(CLIENT, "self._lost_orders = not items and", "self._lost_orders = False and"),
        tests=OF_STORE,
    ),
    controller(
        "any-signature-accepted",
        "a record that is not signed with the job's key is set aside",
        Edit(
            "nvrx_slurm/util/job_key.py",
            "if not hmac.compare_digest(signature, self._signature(place, data)):",
            "if False:",
        ),
        tests=("tests/unit/util/test_job_key.py",),
    ),
)
