"""What `ucxx.py` is made of.

found.py      the library, or how to install it      engine.py   the one thread that owns all of UCX
peer.py       one connection, within that thread     link.py     the same, for the threads that wait for it
side.py       a worker and its endpoints, there too  outcome.py  what one thread does and another waits for
hello.py      what is said before UCX hears of it
"""
