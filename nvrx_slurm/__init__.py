"""Keep long multi-node Slurm jobs alive."""
