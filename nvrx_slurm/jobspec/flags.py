"""The flags of the command line that set keys of job.yaml. Imports nothing."""

from __future__ import annotations

# Key → the flags that set it, what they take, and what `--help` says.
JOB_FLAGS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "nodes": (("-N", "--nodes"), "N", "Nodes that run workers (a job without roles)."),
    "spares": (("--spares",), "N", "Hot spares, on top of them."),
    "workers_per_node": (("--workers-per-node",), "N", "Workers on each node, usually one a GPU."),
    "prewarm": (("--prewarm",), "MODULES", "Start workers with these imported: torch,mymodel or auto."),
    "name": (("-J", "--job-name"), "NAME", "The job's name. Not given: that of the command."),
}

# The same for those that mean what they mean to sbatch. A job without Slurm ignores them.
SBATCH_FLAGS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "slurm.time": (("-t", "--time"), "TIME", "Time limit: 2h, or as sbatch takes it."),
    "slurm.partition": (("-p", "--partition"), "NAME", "Partition."),
    "slurm.account": (("-A", "--account"), "NAME", "Account."),
    "slurm.qos": (("-q", "--qos"), "NAME", "Quality of service."),
    "slurm.extra.nodelist": (("-w", "--nodelist"), "NODES", "Nodes that must be among the job's."),
    "slurm.exclude": (("-x", "--exclude"), "NODES", "Nodes not to use."),
    "slurm.constraint": (("-C", "--constraint"), "LIST", "Features that the nodes must have."),
    "slurm.gpus_per_node": (("--gpus-per-node",), "[TYPE:]N", "GPUs on each node."),
    "slurm.mem": (("--mem",), "SIZE", "Memory of each node; 0 is all of it."),
    "slurm.cpus_per_task": (("-c", "--cpus-per-task"), "N", "CPUs of each node: one task runs there, the agent."),
}

BLOCK = "fault_tolerance"
ATTRIBUTION = f"{BLOCK}.attribution"

# Key below `attribution` → the flag that sets it.
FLAGS = {
    "attrsvc_url": "--ft-attrsvc-url",
    "manage_attrsvc": "--ft-manage-attrsvc",
    "enable_lib": "--ft-attribution-enable-lib",
    "enable_mcp": "--ft-attribution-enable-mcp",
    "http_urls": "--ft-attribution-http-url",
    "timeout": "--ft-attribution-timeout",
    "decision_timeout": "--ft-attribution-decision-timeout",
    "dry_run": "--ft-attribution-dry-run",
    "aggregation": "--ft-attribution-aggregation",
    "slack.channel": "--ft-slack-channel",
    "slack.token_file": "--ft-slack-token-file",
    "dataflow.url": "--ft-dataflow-url",
    "dataflow.index": "--ft-dataflow-index",
    "dataflow.token_file": "--ft-dataflow-token-file",
}

# Deprecated key below `fault_tolerance` → its flag (see `deprecated`).
DEPRECATED_FLAGS = {
    "attribution_endpoint": "--ft-attribution-endpoint",
    "attribution_backends": "--ft-attribution-backend",
    "attribution_loganalysis": "--ft-attribution-loganalysis",
}
