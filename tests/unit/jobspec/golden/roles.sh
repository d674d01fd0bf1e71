#!/bin/bash
# rl: 5 nodes and 2 hot spares, by nvrx-slurm
#SBATCH --job-name=rl
#SBATCH --nodes=7
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@60
#SBATCH --output=/shared/jobs/slurm-%j.out
#SBATCH --mem=0
#SBATCH --exclusive

:  # Slurm reads flags up to the first command; the rest is shell

# The batch host keeps the store and the controller running, starts one agent on each node, and gets Slurm's signals.
exec /shared/venv/bin/python -P -m nvrx_slurm.batch --cluster slurm -- \
  srun --no-kill --kill-on-bad-exit=0 --wait=0 --mpi=none --export=ALL --nodes=7 --ntasks=7 --ntasks-per-node=1 /shared/venv/bin/python -P -m nvrx_slurm.agent <<'NVRX_PLAN'
{
  "name": "rl",
  "roles": [
    {
      "command": [
        "python",
        "policy.py"
      ],
      "nodes_per_replica": 2,
      "min_nodes": 1,
      "workers_per_node": 2,
      "env": {
        "MODEL": "small"
      },
      "name": "policy"
    },
    {
      "command": [
        "python",
        "rollout.py"
      ],
      "replicas": 3,
      "workdir": "/home/me/rollout",
      "env": {
        "MODEL": "large"
      },
      "name": "rollout"
    }
  ],
  "spares": 2,
  "min_spares": null,
  "workdir": "/home/me",
  "folder": "/shared/jobs",
  "fault_tolerance": {},
  "time_limit_s": null,
  "store": {
    "url": "rediss://valkey.example:6380/0",
    "password_file": "/home/me/.valkey-password"
  },
  "lease": null,
  "output": null,
  "version": 2
}
NVRX_PLAN
