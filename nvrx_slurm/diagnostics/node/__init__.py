"""What a node says about itself: its kernel, its cgroup, its memory, disks and GPUs. Read here, and judged elsewhere.

    kernel.py    the kernel's messages since a moment
    cgroup.py    what the job's memory limit has done to its processes
    resources.py memory, pressure, load, disks
    gpus.py      what nvidia-smi says of ECC and remapped rows

All of it reads files of the kernel's, and may block where that does: call it beside the event loop.
"""
