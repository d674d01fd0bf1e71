"""Journal against flow, while the job runs: what is met, what strikes when. Pure."""
