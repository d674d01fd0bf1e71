"""The decisions of a job, without I/O, clock, or thread: facts in, decisions out.

    liveness.py     heartbeats and connections → which nodes are lost
    job.py          the dispatch: one handler per fact; `step(job, fact, now)`
    membership.py   the state of each node: joined, standby, active, lost, left
    rendezvous.py   when a rendezvous opens, when it closes, and with which nodes
    assignment.py   which node gets which ranks
    restart.py      what a failure starts
    cause.py        which of a cycle's failures is the cause
    restart_decision.py  whether there is a restart: attribution, progress, budget
    requests.py     what users ask for: a restart, a drain
    limits.py       budgets, progress, the pause between crashes
    state.py        what all of them share

`step` changes the `ControlState` it is given, in place: copying a fleet of thousands for every fact would make a
rendezvous quadratic. It is deterministic: the same facts at the same times give the same decisions, which is how a
restarted controller gets its state back, and how a journal is replayed.
"""
