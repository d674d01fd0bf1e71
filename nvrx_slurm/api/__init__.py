"""Jobs from Python: submit, find, watch and change them. `nvrx_slurm` has the public names."""
