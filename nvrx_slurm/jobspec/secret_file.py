"""Files that hold a secret: a password, a token, a key."""

from __future__ import annotations

import os
import pwd
import stat

from nvrx_slurm.errors import ConfigError

LONGEST_BYTES = 8193
"""No secret is as long; a file of that length is none."""


def secret_in(file: str, *, key: str) -> str:
    """The content of `file`, which the configuration key `key` names.

    As ssh has it with a private key: a file of this user's own must be for its owner alone; one of root's, as a site
    may provide for a group, must be writable for root alone. Raises ConfigError, whose message never holds what the
    file does.
    """
    try:
        # O_NONBLOCK: a pipe to which nothing writes is opened too, and then refused
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            _check(os.fstat(opened.fileno()), file, key)  # the open file: another may have its name by now
            return opened.read(LONGEST_BYTES).decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", file=file, key=key) from None


def _check(status: os.stat_result, file: str, key: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError("is no plain file; name one with the secret in it", file=file, key=key)
    mode = f"(mode {stat.S_IMODE(status.st_mode):04o})"
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"belongs to {_user(status.st_uid)}; name a file of your own", file=file, key=key)
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        message = f"can be read by others {mode}; `chmod 600` it, and let the secret in it be replaced"
        raise ConfigError(message, file=file, key=key)
    if status.st_mode & 0o022:
        raise ConfigError(f"can be written by others {mode}; `chmod go-w` it", file=file, key=key)


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
