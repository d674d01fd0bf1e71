"""What a site gives to its Prometheus and its Grafana: `nvrx-slurm metrics --show rules` prints it."""
