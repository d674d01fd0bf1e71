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

# The same for keys below `attribution`. A flag that takes nothing is a switch: there is `--no-…`, too.
ATTRIBUTION_FLAGS: dict[str, tuple[str, str, str]] = {
    "attrsvc_url": ("--ft-attrsvc-url", "URL", "Ask the attribution service there why a job failed."),
    "manage_attrsvc": ("--ft-manage-attrsvc", "", "Ask one that the job starts for itself."),
    "enable_lib": ("--ft-attribution-enable-lib", "", "Ask the rules that come with this tool (the default)."),
    "enable_mcp": ("--ft-attribution-enable-mcp", "", "Ask an MCP server."),
    "http_urls": ("--ft-attribution-http-url", "URL", "Ask this service too; repeatable."),
    "timeout": ("--ft-attribution-timeout", "DURATION", "How long one source may take."),
    "decision_timeout": ("--ft-attribution-decision-timeout", "DURATION", "How long a restart waits for them."),
    "dry_run": (
        "--ft-attribution-dry-run",
        "",
        "Record what would have been decided, and restart all the same (the default).",
    ),
    "aggregation": ("--ft-attribution-aggregation", "any|all", "How many sources must say STOP."),
    "slack.channel": ("--ft-slack-channel", "CHANNEL", "Send each failure to this Slack channel."),
    "slack.token_file": ("--ft-slack-token-file", "FILE", "The Slack app's token."),
    "dataflow.url": ("--ft-dataflow-url", "URL", "Keep a document of each failure in an index there."),
    "dataflow.index": ("--ft-dataflow-index", "NAME", "The index."),
    "dataflow.token_file": ("--ft-dataflow-token-file", "FILE", "The index's token."),
}

# Key below `attribution` → the flag that sets it.
FLAGS = {key: flag for key, (flag, _, _) in ATTRIBUTION_FLAGS.items()}

# The same for deprecated keys below `fault_tolerance` (see `deprecated`).
DEPRECATED_FLAGS: dict[str, tuple[str, str, str]] = {
    "attribution_endpoint": ("--ft-attribution-endpoint", "URL", ""),
    "attribution_backends": ("--ft-attribution-backend", "URL|mcp", ""),
    "attribution_loganalysis": ("--ft-attribution-loganalysis", "lib|mcp|url", ""),
}
