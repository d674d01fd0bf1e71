"""URLs of services: their form, without credentials."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

from nvrx_slurm.util.redis_url import LOOKS_LIKE, parse_redis_url

_PORTS = {"http": 80, "https": 443}
_SECRET_QUERY = re.compile(r"(?i)token|key|secret|password|auth|sig")
_WEBHOOKS = "hooks.slack.com"


def parse_url(text: str, *, token_goes_to: str) -> str:
    """The URL in one form: no slash at its end, no default port, its host in lower case.

    `token_goes_to`: where a credential belongs instead. Raises ValueError, which never repeats the URL's text:
    it may hold one.
    """
    try:
        parts = urlsplit(text)
        is_usable = parts.scheme in _PORTS and parts.hostname and parts.port != 0
    except ValueError:  # from urlsplit, or from `port`
        is_usable = False
    if not is_usable or not text.isprintable() or " " in text:
        raise ValueError("must look like https://host:8443, or http://…, with no space in it")
    # Ahead of the refusal of any `?`, since this message says where a credential belongs. The path of a Slack webhook
    # is one.
    secrets = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True) if _SECRET_QUERY.search(name)]
    if "@" in parts.netloc or secrets or parts.hostname == _WEBHOOKS:
        raise ValueError(f"must not hold credentials, since the job script would show them; {token_goes_to}")
    if parts.query or parts.fragment:
        raise ValueError("must end with its path: no `?` and no `#`")
    port = "" if parts.port in (None, _PORTS[parts.scheme]) else f":{parts.port}"
    host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
    return f"{parts.scheme}://{host}{port}{parts.path.rstrip('/')}"


def is_redis(text: str | None) -> bool:
    """Whether this is the URL of a Redis, well written or not, and no path."""
    return text is not None and text.startswith(("redis://", "rediss://"))


def check_redis_url(text: str, *, password_goes_to: str) -> str:
    """The URL, if it is one of a Redis, and holds no password and no option that is not known. Raises ValueError,
    which does not repeat it."""
    if not is_redis(text):  # no unix socket: each node would have its own
        raise ValueError(LOOKS_LIKE)
    parse_redis_url(text, why=f"since the job script would show it; {password_goes_to}")
    return text
