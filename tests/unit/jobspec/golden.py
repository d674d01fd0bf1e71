"""The jobs whose scripts are kept in `golden/`. `python -m tests.unit.jobspec.golden` rewrites the scripts."""

from __future__ import annotations

from pathlib import Path

from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.jobspec.plan import Plan, plan
from nvrx_slurm.jobspec.script import render_job
from tests.unit.jobspec.specs import job_spec

FOLDER = Path(__file__).parent / "golden"
PYTHON = "/shared/venv/bin/python"

PLAIN = {
    "name": "train",
    "command": ["python", "train.py", "--lr", "1e-4"],
    "nodes": 2,
    "spares": 1,
    "workers_per_node": 8,
    "workdir": ".",
    "env": {"OMP_NUM_THREADS": "8"},
    "setup": ["module load cuda", "source venv/bin/activate"],
    "slurm": {"time": "12h", "partition": "gpu"},
}
EVERY_KEY = {
    "name": "every-key",
    "command": "python -c 'print(\"it'\"'\"'s $HOME\")'",
    "nodes": 4,
    "workdir": ".",
    "prewarm": {
        "imports": ["torch", "torch.distributed"],
        "setup": "mymodel.warm:prepare",
        "read": ["checkpoints/latest/**", "/data/shard-{rank}.bin"],
        "memory": "8GiB",
        "timeout": "3m",
    },
    "slurm": {
        "partition": "gpu,backfill",
        "account": "my account",
        "qos": "high",
        "time": "2-00:00:00",
        "gpus_per_node": "h100:8",
        "cpus_per_task": 64,
        "mem": 0,
        "constraint": "[rack1|rack2]",
        "exclude": "node[17-19]",
        "reservation": "maintenance",
        "segment": 16,
        "extra": {
            "comment": 'a "b" \\ #c',
            "exclusive": True,
            "mail-type": "END,FAIL",
            "hold": False,
            "no-requeue": True,
        },
    },
    "fault_tolerance": {
        "quarantine_after": 2,
        "fence_timeout": "45s",
        "heartbeat": {"interval": "500ms", "timeout": "20s", "startup_timeout": "2m"},
        "teardown": {
            "grace": "2m",
            "stop_signal": "int",
            "checkpoint_signal": "USR2",
            "checkpoint_timeout": "5m",
            "gpu_memory_below": "2GiB",
            "gpu_reclaim_timeout": "20s",
        },
        "hang": {
            "startup_timeout": "30m",
            "step_timeout": "10m",
            "no_output": "20m",
            "exit_skew": "1m",
            "learn": True,
            "safety_factor": 2.5,
            "warmup": 20,
        },
    },
}
ROLES = {
    "name": "rl",
    "spares": 2,
    "workdir": ".",
    "env": {"MODEL": "small"},
    "roles": {
        "policy": {"command": "python policy.py", "nodes_per_replica": 2, "workers_per_node": 2, "min_nodes": 1},
        "rollout": {"command": "python rollout.py", "replicas": 3, "workdir": "rollout", "env": {"MODEL": "large"}},
    },
    "slurm": {"extra": {"exclusive": True}},
    "store": {"url": "rediss://valkey.example:6380/0", "password_file": "/home/me/.valkey-password"},
}

JOBS = {"plain": PLAIN, "every-key": EVERY_KEY, "roles": ROLES, "local": PLAIN}


def spec_and_plan(job: dict[str, object]) -> tuple[JobSpec, Plan]:
    spec = job_spec(job)
    return spec, plan(spec, folder=Path("/shared/jobs"), job_file=Path("/home/me/job.yaml"))


def script_of(name: str) -> str:
    """The script of one of the jobs, as it should stand in `golden/`."""
    spec, made = spec_and_plan(JOBS[name])
    return render_job(spec, made, cluster="local" if name == "local" else "slurm", python=PYTHON)


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.sh"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in JOBS:
        path_of(name).write_text(script_of(name))
