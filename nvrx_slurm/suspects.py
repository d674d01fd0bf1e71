"""Nodes that evidence blames: a ledger that the jobs of one user share."""
