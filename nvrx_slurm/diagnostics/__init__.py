"""What a node and its processes are doing now; attribution/ draws the conclusions.

    kernel.py     the kernel's messages since a moment
    resources.py  memory and its cgroup limit, pressure, load, disks, GPUs
    stacks/       the stacks of processes, through their hook, py-spy and /proc

The functions of kernel.py and resources.py read kernel files and may block: call them in a thread.
"""
