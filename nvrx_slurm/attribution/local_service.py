"""An attribution service on this machine: its token, and the user that it runs as.

The token is made at the service's start, and found by the same user's tools. It lies in a folder that only its user
can enter, one file (0600) for each address. The service holds a lock on the file for as long as it lives. A file
without its lock is what a killed service has left: another user may listen at that address by now, so the token is
not sent there.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import secrets
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from nvrx_slurm.errors import SourceError, UsageError
from nvrx_slurm.jobspec.site import state_folder
from nvrx_slurm.util.ownership import is_own

LONGEST_TOKEN_BYTES = 4096
_PORTS = {"http": 80, "https": 443}
_NAME_NOW = "name a token with --token-file, or say --no-token"

# Accounts below it are root's and the system's own (UID_MIN of login.defs(5)): a site may run a service as one.
FIRST_USER_UID = 1000

_LISTENING = "0A"


def token_folder() -> Path:
    """`$XDG_STATE_HOME/nvrx-slurm/attrsvc`, by default in ~/.local/state. It may not exist."""
    return state_folder() / "attrsvc"


@contextlib.contextmanager
def announced(host: str, port: int, token: str, folder: Path | None = None) -> Iterator[Path]:
    """Keep the token where this user's tools look for it, until the end of the block. Raises UsageError."""
    folder = folder or token_folder()
    path = folder / _file_name("127.0.0.1" if host == "localhost" else host, port)
    # Written and locked beside its place, then renamed: it appears under its name locked and whole.
    new = folder / f".{path.name}.{secrets.token_hex(8)}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or not is_own(status, closed=0o077):
            raise UsageError(
                f"{folder}: mode {stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid}: a token is kept only in a"
                f" folder of your own that others cannot enter; chmod 700 {folder}, or {_NAME_NOW}"
            )
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"{folder}: no token can be kept there: {error.strerror}; {_NAME_NOW}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, token.encode())
        new.rename(path)
    except OSError as error:
        os.close(descriptor)
        new.unlink(missing_ok=True)
        raise UsageError(f"{path}: no locked token can be kept there: {error.strerror}; {_NAME_NOW}") from None
    try:
        yield path
    finally:
        # While the caller still listens: a service that starts here next cannot have replaced the file yet.
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)


def find_token(url: str, folder: Path | None = None) -> str | None:
    """The token of this user's own service at a loopback URL; None where no such service lives."""
    try:
        addresses, port = _loopback(url)
    except ValueError:
        return None
    for each in addresses:
        path = (folder or token_folder()) / _file_name(each, port)
        try:
            # The owner is checked after this: until then it may be a link, or a FIFO that would wait for a writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or not is_own(status, closed=0o077):
                continue
            try:
                # A lock that is granted shows that the service is gone, for its own lock went with it.
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if token := file.read(LONGEST_TOKEN_BYTES).decode("ascii", "replace").strip():
                    return token
            except OSError:
                pass  # without locks it cannot be proven that the service lives
    return None


def is_loopback(host: str) -> bool:
    """Whether only this machine gets to that host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _loopback(url: str) -> tuple[list[str], int]:
    """The loopback addresses that a URL may mean, none for another host; and its port. Raises ValueError."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if not is_loopback(host):
        return [], 0
    addresses = ["127.0.0.1", "::1"] if host == "localhost" else [host]
    return addresses, parts.port or _PORTS.get(parts.scheme, 0)


def _file_name(host: str, port: int) -> str:
    """With the machine's name: a home folder may be shared by many."""
    return f"{socket.gethostname()}-{host}-{port}.token".replace("/", "_")


def check_listener(url: str) -> None:
    """Refuse a loopback URL at which another user's process listens: it would get the token, and its verdict could
    end the job. Where nothing listens, or /proc does not say, nothing is refused. Raises SourceError.

    Source: proc_net_tcp in the kernel's documentation; its uid is that of the user who opened the socket.
    """
    addresses, number = _loopback(url)
    if not addresses:
        return
    every = (*addresses, "0.0.0.0", "::")
    # A socket of IPv6 can hold an IPv4 address in its mapped form (ipv6(7)), and gets the connections to it.
    mapped = [f"::ffff:{each}" for each in every if ":" not in each]
    places = set()
    for each in (*every, *mapped):
        # As the kernel writes an address there: 32-bit words in the machine's own byte order.
        packed = ipaddress.ip_address(each).packed
        places.add("".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed)))
    port = f"{number:04X}"
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
