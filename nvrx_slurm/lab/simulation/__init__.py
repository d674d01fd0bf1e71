"""Agents and the controller in one process: virtual time, simulated processes, network and store, and one seed.

    loop.py       virtual time: what runs next, and when (steps.py: what that is, and whose)
    process.py    what is killed, frozen and thawed together
    network.py    ways between hosts: latency, loss, cuts
    sockets.py    what processes use of it (connections.py, datagrams.py)
    calls.py      requests to a service of another host

Nothing here waits: a virtual minute takes as long as what is computed in it. The store is `testing.valkey`.
"""
