"""Stacks of live processes: without a change to their code, without stopping them, and never killing one.

| module | what it does |
|---|---|
| `hook/sitecustomize.py` | first on a worker's PYTHONPATH: prints its stacks on a signal, reports its exception |
| `hook_client.py` | the environment that installs the hook; asks a process that has it |
| `process.py` | reads /proc of any process |
| `programs.py` | runs py-spy and nvidia-smi, where they are installed |
| `traces.py` | parses the stacks that faulthandler and py-spy print (pure) |
| `dump.py` | all of it, for the processes of a node, into one file a rank, within one bound |
"""
