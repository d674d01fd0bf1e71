#!/bin/bash
# train: 2 nodes and 1 hot spare, by nvrx-slurm

:  # Slurm reads flags up to the first command; the rest is shell

start_batch_host() {

# The batch host keeps the store and the controller running, starts one agent on each node, and gets Slurm's signals.
exec /shared/venv/bin/python -P -m nvrx_slurm.batch --cluster local "$@" <<'NVRX_PLAN'
{
  "name": "train",
  "roles": [
    {
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
      },
      "name": "main"
    }
  ],
  "spares": 1,
  "min_spares": null,
  "workdir": "/home/me",
  "folder": "/shared/jobs",
  "fault_tolerance": {},
  "time_limit_s": 43200.0,
  "store": {},
  "lease": null,
  "output": null,
  "version": 2
}
NVRX_PLAN
}

# A line of `setup` that fails fails the job: by its own status, not by those of commands in files that it sources.
# So does `exit`, with 0 too: the job has not run.
trap 'start_batch_host --failed-setup $? 0 "$BASH_COMMAND"' EXIT
setup_failed() { [ "$1" = 0 ] || start_batch_host --failed-setup "$1" $(($2 - before_setup)) "$3"; }
trap 'setup_failed $(($? * (${#BASH_SOURCE[@]} == 1))) "$LINENO" "$BASH_COMMAND"' ERR
# Without these the EXIT trap would get the status of an earlier command: USR1 announces the time limit.
trap 'exit 138' USR1
trap 'exit 143' TERM
before_setup=$LINENO
module load cuda
source venv/bin/activate
trap - ERR EXIT TERM USR1
start_batch_host
