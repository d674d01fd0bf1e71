"""What a node itself says of its state: its kernel, its memory, its disks, its GPUs."""
