"""Agents and the controller in one process: virtual time, a simulated cluster, and one seed that decides everything.

What is real: the agent, the controller with the core, the store client, the codec, the liveness protocol. They get
their clock, their machine and their environment as arguments, and so run here unchanged.

    run.py          one run of one seed; seeds.py: thousands of them, and the shortest that broke a promise
    shapes.py       what is drawn: the job, its bounds, how its workers behave
    adversary.py    where faults are drawn, and what each does
    promises.py     where promises are checked: at each step, and of a whole run

    machine.py      the real agent, and the machine that it touches
    controller.py   the real controller, and what surrounds it
    batch.py, store.py, node.py, supervisor.py, workers.py
                    simulated: the batch host, the store's process, one node, its supervisor, the workers
    loop.py         virtual time: what runs next, and when
    process.py      what is killed, frozen and continued together
    network.py      links between hosts: latency, loss, cuts; sockets.py: what processes use of them
    valkey_*.py     an in-memory Valkey: its server, its data and commands, a client for the store's code

Nothing here waits: a virtual minute takes as long as what is computed in it.
"""
