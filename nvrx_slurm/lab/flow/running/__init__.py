"""Runs flows: a suite, each attempt in a process of its own, and what sees to it that nothing outlives them."""
