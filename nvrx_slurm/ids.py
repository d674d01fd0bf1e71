"""Names that must be unique, and names of replicas."""

from __future__ import annotations

import secrets


def new_incarnation() -> str:
    """A fresh name for one agent process; no two agents of a job ever share one."""
    return secrets.token_hex(6)


def new_secret() -> str:
    """A password or token: 256 bits, URL-safe."""
    return secrets.token_urlsafe(32)


def replica_id(role: str, index: int) -> str:
    """`policy`, 0 → `policy-0`."""
    return f"{role}-{index}"
