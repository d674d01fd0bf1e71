"""Runs flows: a suite, each attempt in a process of its own, and the cleanup after them."""
