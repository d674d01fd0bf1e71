"""Agents and the controller in one process: virtual time, simulated processes, network and store, and one seed.

    run.py          one run: a job, its nodes, its control plane, its adversary, from one seed; seeds.py: thousands
    shapes.py       the job that a seed draws; adversary.py: the faults that it draws
    promises.py     what must hold after every step; verdict.py: what must hold at the end
    mains.py        the product's own agents and controller, with simulated surroundings
    batch.py, node.py, machine.py, supervisor.py, workers.py, store.py, connections.py    those surroundings
    loop.py         virtual time: what runs next, and when
    process.py      what is killed, frozen and thawed together, and what its kernel holds for it
    network.py      ways between hosts: latency, loss, cuts; sockets.py: what processes use of it

Nothing here waits: a virtual minute takes as long as what is computed in it. The store is `lab/faults/valkey`.
"""
