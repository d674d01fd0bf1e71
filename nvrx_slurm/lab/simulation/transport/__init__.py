"""Payloads from producers to readers: rings, servers and clients of the product, on virtual threads."""
