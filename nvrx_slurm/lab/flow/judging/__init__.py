"""Journal against flow, while the job runs: which expectations are met, which faults are due. Pure."""
