"""Why a job failed, and whether a restart can help: rules over logs, other sources, and what follows."""
