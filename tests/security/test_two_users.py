"""The attacks in this folder run as another user, who has no rights over alice's files and processes."""

from __future__ import annotations

import os
from pathlib import Path


def read(path: str) -> str:
    try:
        return Path(path).read_text()
    except PermissionError:
        return "denied"


def identity() -> list[int]:
    return [os.getuid(), os.geteuid(), *os.getgroups()]


def test_bob_is_another_user(bob, common):
    """Bob cannot read alice's private files, and can read her public ones."""
    for name, mode in (("private", 0o600), ("public", 0o644)):
        (common / name).write_text(name)
        (common / name).chmod(mode)
    assert bob.run(read, str(common / "private")) == "denied"
    assert bob.run(read, str(common / "public")) == "public"


def test_bob_has_given_up_root(bob):
    """Bob's process has no uid or group of root or of the test's own user."""
    assert 0 not in bob.run(identity)
    assert os.geteuid() not in bob.run(identity)
