"""What an HTTP reply means."""

from __future__ import annotations

import hashlib
from email.utils import parsedate_to_datetime

from nvrx_slurm.attribution.sources.exchange import Reply
from nvrx_slurm.errors import MalformedRecord
from nvrx_slurm.journal.verdicts import FailureKey
from nvrx_slurm.util.decoding import decode_json

MOST_TEXT = 400

_MAY_PASS = frozenset({429, 500, 502, 503, 504})
_ADVICE = {
    401: "its token comes from `token_file`, or else from NVRX_SLURM_ATTRSVC_TOKEN",
    404: "no attribution service answers at this URL",
    413: "the inquiry is longer than the service takes",
}


def identity(key: FailureKey) -> str:
    """How the service names an inquiry in its paths."""
    return hashlib.sha256(str(key).encode()).hexdigest()[:32]


def may_pass(status: int) -> bool:
    """Whether the same request may do better a little later."""
    return status in _MAY_PASS


def problem(reply: Reply) -> str:
    """One sentence about a reply that is no answer."""
    if 300 <= reply.status < 400:
        location = reply.headers.get("location", "nowhere")
        return f"the service redirects to {location[:MOST_TEXT]}: give that URL itself, redirects are not followed"
    parts = [f"the service says {reply.status}", _said(reply), _ADVICE.get(reply.status, "")]
    return ": ".join(part for part in parts if part)


def retry_after_s(reply: Reply, now: float) -> float | None:
    """How long the service asks to wait; `now` in seconds since the epoch. None: it says nothing valid."""
    value = reply.headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now)
    except (ValueError, OverflowError):
        return None


def _said(reply: Reply) -> str:
    """The service's own words: of `{"error": …}`, or else the start of what it sent."""
    try:
        said = decode_json(dict[str, object], reply.body, "the reply").get("error")
    except MalformedRecord:
        said = None
    text = said if isinstance(said, str) else reply.body[:MOST_TEXT].decode(errors="replace")
    return " ".join(text.split())[:MOST_TEXT]
