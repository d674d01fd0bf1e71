"""`python -m nvrx_slurm` is `nvrx-slurm`."""

from nvrx_slurm.cli import main

main()
