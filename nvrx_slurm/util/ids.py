"""Names that must be unique, and names of replicas."""

from __future__ import annotations


def new_incarnation() -> str:
    """A fresh name for one agent process; no two agents of a job ever share one."""
    from random import SystemRandom  # with hashlib, which a program that only names replicas does without

    return SystemRandom().randbytes(6).hex()


def succeeding(incarnation: str, number: int) -> str:
    """The name under which the same process joins again, for the `number`th time: `3f2a` → `3f2a-1`."""
    return f"{incarnation}-{number}"


def precedes(one: str, other: str) -> bool:
    """Whether `one` is an earlier name of the process that has joined as `other` since."""
    process, _, number = one.partition("-")
    same, _, later = other.partition("-")
    return process == same and later.isdigit() and int(number if number.isdigit() else 0) < int(later)


def new_secret() -> str:
    """A password or token: 256 bits, URL-safe."""
    import secrets  # with hmac and OpenSSL, which a program that only needs a name does without

    return secrets.token_urlsafe(32)


def replica_id(role: str, index: int) -> str:
    """`policy`, 0 → `policy-0`."""
    return f"{role}-{index}"
