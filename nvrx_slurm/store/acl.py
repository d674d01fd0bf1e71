"""What a user of a site's store needs there for jobs, and no more: the rule of an ACL user.

`store.namespace` in job.yaml puts a user's jobs below `nvrx:{<namespace>/`, so that one rule, written before any job
exists, covers all of them and none of another user's. `COMMANDS` is what agents, controller, command line, in-process
groups and payload directories send, scripts included; `tests/security/test_store_acl.py` runs them with just these.
"""

from __future__ import annotations

import re

from nvrx_slurm.errors import UsageError
from nvrx_slurm.store.keys import Keys

COMMANDS = (
    *("ping", "time", "select", "client|setinfo", "evalsha", "script|load"),
    *("get", "set", "incr", "exists", "expire", "persist", "unlink"),
    *("hget", "hgetall", "hincrby", "hlen", "hset", "hsetnx", "lrange", "lrem", "rpush"),
    *("xadd", "xrange", "xread", "xrevrange", "xtrim"),
)

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def rule(user: str, pattern: str) -> str:
    """The command that makes an ACL user: `pattern` for keys, no channel, and `COMMANDS`. It replaces what the user
    may do now, and keeps no password: `PASSWORD` stands for the new one. Raises UsageError."""
    _check_word("user", user)
    return f"ACL SETUSER {user} reset on >PASSWORD ~{pattern} {' '.join(f'+{name}' for name in COMMANDS)}"


def pattern_of_namespace(namespace: str) -> str:
    """The keys of all jobs with this `store.namespace`. Raises UsageError."""
    _check_word("namespace", namespace)
    return f"nvrx:{{{namespace}/*"


def _check_word(what: str, word: str) -> None:
    # Anything else could end the word of the ACL command, or be a pattern that covers more keys.
    if not _WORD.fullmatch(word):
        raise UsageError(
            f"{what} {word!r} must be 1 to 64 letters, digits, '.', '_' or '-', no sign at its beginning"
        )


def pattern_of_job(name: str) -> str:
    """The keys of one job, by its name in them (`StoreAddress.job`)."""
    return Keys(name).epoch.removesuffix("epoch") + "*"
