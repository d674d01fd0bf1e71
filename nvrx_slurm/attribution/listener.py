"""Whose process listens at a loopback address: the port of a service that has ended is free for any user."""

from __future__ import annotations

import ipaddress
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

from nvrx_slurm.attribution.local_token import is_loopback
from nvrx_slurm.errors import SourceError

FIRST_USER_UID = 1000
"""Accounts below it are root's and the system's own (UID_MIN of login.defs(5)): a site may run a service as one."""

_LISTENING = "0A"


def check_listener(url: str) -> None:
    """Refuse a loopback URL at which another user's process listens: it would get the token, and its verdict could
    end the job. Where nothing listens, or /proc does not say, nothing is refused. Raises SourceError.

    Source: proc_net_tcp in the kernel's documentation; its uid is that of the user who opened the socket.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if not is_loopback(host):
        return
    addresses = ["127.0.0.1", "::1"] if host == "localhost" else [host]
    places = {_hex(each) for each in (*addresses, "0.0.0.0", "::")}
    port = f"{parts.port or (443 if parts.scheme == 'https' else 80):04X}"
    for name in ("tcp", "tcp6"):
        try:
            rows = Path("/proc/net", name).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            address, _, at = fields[1].partition(":")
            uid = int(fields[7])
            is_there = fields[3] == _LISTENING and at == port and address in places
            if is_there and uid != os.geteuid() and uid >= FIRST_USER_UID:
                raise SourceError(f"{url}: the process that listens there belongs to uid {uid}, and is not asked")


def _hex(address: str) -> str:
    """As the kernel writes an address there: 32-bit words in the machine's own byte order."""
    packed = ipaddress.ip_address(address).packed
    words = [packed[start : start + 4] for start in range(0, len(packed), 4)]
    return "".join((word[::-1] if sys.byteorder == "little" else word).hex().upper() for word in words)
