"""Benchmarks: each prints what it measured as a ratio to something else measured in the same run."""
