"""Files that hold a secret: a password, a token, a key."""

from __future__ import annotations

import os
import stat

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.util.ownership import user_name

# No secret is as long; a file of that length is none.
LONGEST_BYTES = 8193


def secret_in(file: str, *, key: str) -> str:
    """The content of `file`, which the configuration key `key` names. Raises ConfigError, whose message never holds
    what the file does."""
    try:
        # O_NONBLOCK: a pipe to which nothing writes is opened too, and then refused
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            status = os.fstat(opened.fileno())  # of the open file: another may have its name by now
            mode = f"(mode {stat.S_IMODE(status.st_mode):04o})"
            # As ssh has it with a private key: a file of this user's own must be for its owner alone; one of root's,
            # as a site may provide for a group, must be writable for root alone.
            problem = ""
            if not stat.S_ISREG(status.st_mode):
                problem = "is no plain file; name one with the secret in it"
            elif status.st_uid not in (0, os.geteuid()):
                problem = f"belongs to {user_name(status.st_uid)}; name a file of your own"
            elif status.st_uid == os.geteuid() and status.st_mode & 0o077:
                problem = f"can be read by others {mode}; `chmod 600` it, and let the secret in it be replaced"
            elif status.st_mode & 0o022:
                problem = f"can be written by others {mode}; `chmod go-w` it"
            if problem:
                raise ConfigError(problem, file=file, key=key)
            # `replace`: the repr of a UnicodeDecodeError holds the bytes that could not be read, so the secret.
            return opened.read(LONGEST_BYTES).decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", file=file, key=key) from None
