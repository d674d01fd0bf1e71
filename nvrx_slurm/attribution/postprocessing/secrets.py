"""Tokens: from a file that only its owner can read, or from the environment; never from argv, and shown nowhere."""

from __future__ import annotations

import os
import stat

from nvrx_slurm.errors import ConfigError

LONGEST_TOKEN = 8192


def token_of(file: str | None, variable: str | None, *, key: str) -> str | None:
    """The token in `file`, or else in the variable's value; None where neither is given.

    `key` is the configuration key that names the file. Raises ConfigError where the file cannot be read, where others
    can read it, and where it holds no token; the message never holds what the file does.
    """
    if file is None:
        return _plain(variable, None, key) if variable else None
    try:
        # O_NONBLOCK: a pipe to which nobody writes is opened too, and then refused
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            _check_mode(os.fstat(opened.fileno()).st_mode, file, key)  # of what is open, whatever is there by now
            text = opened.read(LONGEST_TOKEN + 1).decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", file=file, key=key) from None
    return _plain(text, file, key)


def _check_mode(mode: int, file: str, key: str) -> None:
    if not stat.S_ISREG(mode):
        raise ConfigError("is no plain file; name one with the token in it", file=file, key=key)
    if mode & 0o077:
        raise ConfigError(
            f"can be read by others (mode {stat.S_IMODE(mode):04o}); `chmod 600` it, and let the token be replaced",
            file=file,
            key=key,
        )


def _plain(text: str, file: str | None, key: str) -> str:
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or len(token) > LONGEST_TOKEN:
        raise ConfigError(
            "holds no token: it must be one line of printable ASCII", file=file or "environment", key=key
        )
    return token
