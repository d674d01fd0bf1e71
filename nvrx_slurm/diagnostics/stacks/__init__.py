"""Stacks of live processes: without a change to their code, without stopping them, and never killing one.

| module | what it does |
|---|---|
| `hook/sitecustomize.py` | first on a worker's PYTHONPATH: prints its stacks when asked; tells of its end |
| `environment.py` | what a worker's environment must say for that |
| `asking.py` | asks a process that has the hook, and knows when its answer is whole |
| `process.py`, `syscalls.py` | what /proc says of any process |
| `programs.py` | what py-spy and nvidia-smi say, where they are installed |
| `traces.py` | reads the hook's answer (pure) |
| `aside.py` | blocking work beside the event loop, which may never come back |
| `dump.py` | all of it, for the processes of a node, into one file a rank, within one bound |
"""
