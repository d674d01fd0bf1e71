"""The job script: bash that starts one process and decides nothing."""
