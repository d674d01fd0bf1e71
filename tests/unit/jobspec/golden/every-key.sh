#!/bin/bash
# every-key: 4 nodes, by nvrx-slurm
#SBATCH --job-name=every-key
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@450
#SBATCH --output=/shared/jobs/slurm-%j.out
#SBATCH --time=2-00:00:00
#SBATCH --partition=gpu,backfill
#SBATCH --account="my account"
#SBATCH --qos=high
#SBATCH --gpus-per-node=h100:8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --constraint=[rack1|rack2]
#SBATCH --exclude=node[17-19]
#SBATCH --reservation=maintenance
#SBATCH --segment=16
#SBATCH --comment="a \"b\" \\ #c"
#SBATCH --mail-type=END,FAIL
#SBATCH --exclusive
#SBATCH --no-requeue

:  # Slurm reads flags up to the first command: from here on all is shell

# The batch host keeps the store and the controller running, starts one agent on each node, and gets Slurm's signals.
exec /shared/venv/bin/python -P -m nvrx_slurm.batch --cluster slurm -- \
  srun --no-kill --kill-on-bad-exit=0 --wait=0 --mpi=none --export=ALL --nodes=4 --ntasks=4 --ntasks-per-node=1 --cpus-per-task=64 --gpus-per-node=h100:8 /shared/venv/bin/python -P -m nvrx_slurm.agent <<'NVRX_PLAN'
{
  "name": "every-key",
  "roles": [
    {
      "name": "main",
      "command": [
        "python",
        "-c",
        "print(\"it's $HOME\")"
      ],
      "nodes_per_replica": 4
    }
  ],
  "workdir": "/home/me",
  "folder": "/shared/jobs",
  "fault_tolerance": {
    "progress": {},
    "attribution": {
      "enable_lib": true,
      "timeout_s": 60.0,
      "decision_timeout_s": 10.0
    },
    "quarantine_after": 2,
    "heartbeat_interval_s": 0.5,
    "heartbeat_timeout_s": 20.0,
    "startup_timeout_s": 120.0,
    "fence_timeout_s": 45.0,
    "join_timeout_s": 600.0,
    "last_call_s": 5.0,
    "teardown_grace_s": 120.0,
    "stop_signal": "SIGINT",
    "checkpoint_signal": "SIGUSR2",
    "checkpoint_timeout_s": 300.0,
    "gpu_memory_below_bytes": 2147483648,
    "gpu_reclaim_timeout_s": 20.0,
    "control_plane_grace_s": 600.0,
    "hang": {
      "startup_s": 1800.0,
      "step_s": 600.0,
      "no_output_s": 1200.0,
      "exit_skew_s": 60.0,
      "learn": true,
      "safety_factor": 2.5,
      "warmup": 20
    },
    "backoff": {
      "within_s": 60.0,
      "initial_s": 1.0,
      "max_s": 60.0
    }
  },
  "time_limit_s": 172800.0
}
NVRX_PLAN
