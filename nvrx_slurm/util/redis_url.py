"""The URL of a Redis or Valkey: its parts, and the options that it may have. Standard library only."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

# What a `rediss://` URL of a site's store may end in: `?ssl_ca_certs=/path`. redis-py takes any attribute of
# a connection there. An option that would turn a check off, holds a secret, or has no meaning is refused.
URL_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")

LOOKS_LIKE = "must look like redis://host:6379/0 or rediss://host:6380/0"
DEFAULT_PORT = 6379

_SECRETS = ("password", "ssl_password", "credential_provider")
_UNCHECKED = ("ssl_check_hostname", "ssl_cert_reqs", "ssl_include_verify_flags", "ssl_exclude_verify_flags")


class RedisUrl(msgspec.Struct, frozen=True):
    """`redis://[user@]host[:port][/database]`, `rediss://…` with `URL_OPTIONS`, or `unix://[user@]/path`.

    `path`: of a unix socket, else "". `tls`: the options of TLS, None without TLS.
    """

    text: str
    host: str
    port: int
    path: str
    database: int
    username: str | None
    tls: dict[str, str] | None


def parse_redis_url(text: str, *, why: str = "since messages show it; name a password_file") -> RedisUrl:
    """Raises ValueError, in words that follow the URL's name, and without the URL: it may hold a password. `why`: it
    must not hold one, and where the password belongs."""
    try:
        parts = urlsplit(text)
        is_unix = parts.scheme == "unix"
        database = 0 if is_unix else int(parts.path.strip("/") or 0)
        port = parts.port or DEFAULT_PORT
    except ValueError:
        raise ValueError(LOOKS_LIKE) from None
    is_known = parts.scheme in ("redis", "rediss", "unix") and parts.port != 0
    if not is_known or not (parts.path if is_unix else parts.hostname):
        raise ValueError(LOOKS_LIKE)
    is_tls = parts.scheme == "rediss"
    # Nothing of the options is repeated in a message: they may hold a secret.
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    known = ", ".join(URL_OPTIONS)
    if parts.password is not None or not set(names).isdisjoint(_SECRETS):
        raise ValueError(f"must not hold a password, {why}")
    if not set(names).isdisjoint(_UNCHECKED):
        raise ValueError(
            f"must not say how its certificate is checked: with rediss:// it always is, its host name too ({known})"
        )
    if len(set(names)) < len(names) or not set(names) <= set(URL_OPTIONS):
        raise ValueError(f"has an option that is not known, or one twice; known are {known}")
    if names and not is_tls:
        raise ValueError(f"has options of TLS, which only rediss:// takes: {known}")
    return RedisUrl(
        text,
        parts.hostname or "",
        port,
        unquote(parts.path) if is_unix else "",
        database,
        unquote(parts.username) if parts.username else None,
        dict(parse_qsl(parts.query)) if is_tls else None,
    )
