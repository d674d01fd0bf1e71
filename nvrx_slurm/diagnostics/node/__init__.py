"""The state of a node, read from its kernel and nvidia-smi; attribution/ draws the conclusions.

    kernel.py     the kernel's messages since a moment
    resources.py  memory and its cgroup limit, pressure, load, disks, GPUs

The functions read kernel files and may block: call them in a thread.
"""
