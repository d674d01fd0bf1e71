"""The process beside each rank: it sees what the rank itself cannot, and each lives only as long as the other.

handle.py     the rank's side: start it by exec, wait until it is ready, leave it
__main__.py   where it begins, with an interpreter that has nothing of the rank's
serving.py    its loop: the rank's end, its silence, its orders, the lease
guard.py      what it does about a silent rank. Pure
process.py    another process: whether it lives, how it ended, signals that reach no later one of the same number
scribe.py     its thread for the store: beats, and what is recorded
sibling.py    how that looks after another member
ring.py       whom it watches there, and when that one is dead for sure. Pure
neighbour.py  the sibling's process, where it is on this host
lease.py      until when rank and monitor may live without a beat that gets through
voice.py      its log lines, which wait for no reader
wire.py       what rank and monitor say to each other
"""
