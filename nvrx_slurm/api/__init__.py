"""Jobs from Python. The command line does nothing that cannot be done from here; see `nvrx_slurm` for the names."""
