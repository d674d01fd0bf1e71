"""Payloads from rings to readers: the product's slots, claims, servers, clients and quarantine on virtual threads.

history.py   one history: producers, readers, the faults, and a last phase without faults
shape.py     what a seed draws
promises.py  what must hold in every history
rings.py     rings in memory, their locks and wake-ups; the names that the product's modules have meanwhile
links.py     connections: latency, stalls, resets, torn and corrupt bytes
"""
