"""The process beside each rank: it sees what the rank itself cannot, and each lives only as long as the other.

handle.py     the rank's side: start it by exec, wait until it is ready, leave it
__main__.py   where it begins, with an interpreter that has nothing of the rank's
serving.py    its loop: the rank's end, its silence, its orders, the lease
guard.py      what it does about a silent rank. Pure
process.py    another process: whether it lives, how it ended, signals that reach no later one of the same number
log_writer.py its thread for the store: beats, the lease, and what is recorded
sibling.py    how that thread watches the next member in the ring
wire.py       the messages between rank and monitor
"""
