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

:  # Slurm reads flags up to the first command: from here on all is shell

# The batch host keeps the store and the controller running, starts one agent on each node, and gets Slurm's signals.
exec /shared/venv/bin/python -P -m nvrx_slurm.batch --cluster slurm -- \
  srun --no-kill --kill-on-bad-exit=0 --wait=0 --mpi=none --export=ALL --nodes=7 --ntasks=7 --ntasks-per-node=1 /shared/venv/bin/python -P -m nvrx_slurm.agent <<'NVRX_PLAN'
{
  "name": "rl",
  "roles": [
    {
      "name": "policy",
      "command": [
        "python",
        "policy.py"
      ],
      "nodes_per_replica": 2,
      "min_nodes": 1,
      "workers_per_node": 2,
      "env": {
        "MODEL": "small"
      }
    },
    {
      "name": "rollout",
      "command": [
        "python",
        "rollout.py"
      ],
      "replicas": 3,
      "workdir": "/home/me/rollout",
      "env": {
        "MODEL": "large"
      }
    }
  ],
  "spares": 2,
  "workdir": "/home/me",
  "folder": "/shared/jobs",
  "fault_tolerance": {
    "progress": {},
    "attribution": {
      "enable_lib": true,
      "timeout_s": 60.0,
      "decision_timeout_s": 10.0
    },
    "heartbeat_interval_s": 1.0,
    "heartbeat_timeout_s": 15.0,
    "startup_timeout_s": 60.0,
    "fence_timeout_s": 30.0,
    "join_timeout_s": 600.0,
    "last_call_s": 5.0,
    "teardown_grace_s": 10.0,
    "checkpoint_timeout_s": 60.0,
    "gpu_reclaim_timeout_s": 50.0,
    "control_plane_grace_s": 600.0,
    "hang": {
      "safety_factor": 5.0
    },
    "backoff": {
      "within_s": 60.0,
      "initial_s": 1.0,
      "max_s": 60.0
    }
  },
  "store_url": "rediss://valkey.example:6380/0",
  "store_password_file": "/home/me/.valkey-password"
}
NVRX_PLAN
