"""The decisions of a job, without I/O, clock, or thread: facts in, decisions out.

    liveness.py     heartbeats and connections → which nodes are lost
    job.py          the dispatch: one handler per fact; `step(job, fact, now)`
    membership.py   who is here: joined, standby, active, lost, left
    rendezvous.py   when a round opens, when it closes, and with whom
    assignment.py   which node gets which ranks
    restart.py      what is done about a failure
    state.py        what all of them share

`step` changes the `Job` it is given, in place: copying a fleet of thousands for every fact would make a round
quadratic. It is deterministic: the same facts at the same times give the same decisions, which is how a restarted
controller gets its state back, and how a journal is replayed.
"""
