"""Logs of any size and layout, read once, with bounded memory: lines that a rule recognises."""
