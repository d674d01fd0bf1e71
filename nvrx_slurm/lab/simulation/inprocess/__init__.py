"""Groups of ranks that restart in process: the product's calls, groups, interrupters and monitors on virtual threads.

history.py    one history: the ranks' processes, the function that they call, the faults
shape.py      what a seed draws
promises.py   what must hold in every history, by a model of the log of its own
kernel.py     what a kernel does for ranks and monitors; the names that the product's modules have meanwhile
store.py      the store, with links that lose, delay and repeat
"""
