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

:  # Slurm reads flags up to the first command; the rest is shell

# The batch host keeps the store and the controller running, starts one agent on each node, and gets Slurm's signals.
exec /shared/venv/bin/python -P -m nvrx_slurm.batch --cluster slurm -- \
  srun --no-kill --kill-on-bad-exit=0 --wait=0 --mpi=none --export=ALL --nodes=4 --ntasks=4 --ntasks-per-node=1 --cpus-per-task=64 --gpus-per-node=h100:8 /shared/venv/bin/python -P -m nvrx_slurm.agent <<'NVRX_PLAN'
{
  "name": "every-key",
  "roles": [
    {
      "command": [
        "python",
        "-c",
        "print(\"it's $HOME\")"
      ],
      "nodes_per_replica": 4,
      "prewarm": {
        "imports": [
          "torch",
          "torch.distributed"
        ],
        "setup": "mymodel.warm:prepare",
        "read": [
          "/home/me/checkpoints/latest/**",
          "/data/shard-{rank}.bin"
        ],
        "memory": 8589934592,
        "timeout": 180.0
      },
      "name": "main"
    }
  ],
  "spares": 0,
  "min_spares": null,
  "workdir": "/home/me",
  "folder": "/shared/jobs",
  "fault_tolerance": {
    "quarantine_after": 2,
    "fence_timeout": 45.0,
    "heartbeat": {
      "interval": 0.5,
      "timeout": 20.0,
      "startup_timeout": 120.0
    },
    "teardown": {
      "grace": 120.0,
      "stop_signal": "SIGINT",
      "checkpoint_signal": "SIGUSR2",
      "checkpoint_timeout": 300.0,
      "gpu_memory_below": 2147483648,
      "gpu_reclaim_timeout": 20.0
    },
    "hang": {
      "startup_timeout": 1800.0,
      "step_timeout": 600.0,
      "no_output": 1200.0,
      "exit_skew": 60.0,
      "learn": true,
      "safety_factor": 2.5,
      "warmup": 20
    }
  },
  "time_limit_s": 172800.0,
  "store": {},
  "lease": null,
  "output": null,
  "version": 2
}
NVRX_PLAN
