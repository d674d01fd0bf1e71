"""What a training script may import: standard library only, cheap to import, and silent where no agent listens.

```python
from nvrx_slurm.workload import beat, section

for step in range(first, last):
    train(step)
    beat(step=step)
    if step % 1000 == 0:
        with section("checkpoint", timeout="10m"):
            save(step)
```

    progress.py   `beat`
    sections.py   `section`
    decorator.py  `section` as a decorator
    restarting.py the section of a restart in process; `nvrx_slurm.inprocess` opens it
    channel.py    a datagram to the agent
    board.py      where a process's sections stand, and which process's
    layout.py     where each number lies in the memory that a worker shares with its agent
    slot.py       what these numbers mean, and the agent's side of them
"""

from nvrx_slurm.workload.progress import beat
from nvrx_slurm.workload.sections import section

__all__ = ["beat", "section"]
