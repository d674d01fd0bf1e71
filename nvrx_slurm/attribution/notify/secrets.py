"""Tokens: from a file that only its owner can read, or from the environment; never from argv, and shown nowhere."""

from __future__ import annotations

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec.secret_file import secret_in

LONGEST_TOKEN = 8192


def token_of(file: str | None, variable: str | None, *, key: str) -> str | None:
    """The token in `file`, or else in the variable's value; None where neither is given.

    `key` is the configuration key that names the file. Raises ConfigError where the file cannot be read, where others
    can read it, and where it holds no token; the message never holds what the file does.
    """
    if file is None:
        return _plain(variable, None, key) if variable else None
    return _plain(secret_in(file, key=key), file, key)


def _plain(text: str, file: str | None, key: str) -> str:
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or len(token) > LONGEST_TOKEN:
        raise ConfigError(
            "holds no token: it must be one line of printable ASCII", file=file or "environment", key=key
        )
    return token
