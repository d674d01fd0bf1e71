#!/bin/bash
# train: 2 nodes and 1 hot spare, by nvrx-slurm
#SBATCH --job-name=train
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@60
#SBATCH --output=/shared/jobs/slurm-%j.out
#SBATCH --time=0-12:00:00
#SBATCH --partition=gpu

:  # Slurm reads flags up to the first command: from here on all is shell
module load cuda
source venv/bin/activate

# The batch host keeps the store and the controller running, starts one agent on each node, and gets Slurm's signals.
exec /shared/venv/bin/python -P -m nvrx_slurm.batch --cluster slurm -- \
  srun --no-kill --kill-on-bad-exit=0 --wait=0 --mpi=none --export=ALL --nodes=3 --ntasks=3 --ntasks-per-node=1 /shared/venv/bin/python -P -m nvrx_slurm.agent <<'NVRX_PLAN'
{
  "name": "train",
  "roles": [
    {
      "name": "main",
      "command": [
        "python",
        "train.py",
        "--lr",
        "1e-4"
      ],
      "nodes_per_replica": 2,
      "workers_per_node": 8,
      "env": {
        "OMP_NUM_THREADS": "8"
      }
    }
  ],
  "spares": 1,
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
  "time_limit_s": 43200.0
}
NVRX_PLAN
