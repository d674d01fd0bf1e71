"""Real faults, made on purpose, for flows, tests and the demo.

node.py                  a node dies
disk.py                  a disk is full
network.py               nodes with a network of their own, which is cut, slowed, or breaks connections
network_switch.py        the switch between them, a process
sick_ports.py            a payload server that is silent, breaks off, or sends what is wrong
attribution_server.py    an attribution service that is slow, wrong, or away
"""
