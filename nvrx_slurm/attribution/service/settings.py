"""How a service is set up: what the command line says, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from nvrx_slurm.attribution.local_service import is_loopback
from nvrx_slurm.attribution.service.storage import RetentionLimits
from nvrx_slurm.errors import UsageError
from nvrx_slurm.jobspec import env
from nvrx_slurm.util.secret_file import secret_in

SHORTEST_TOKEN = 16


@dataclass(frozen=True, slots=True)
class BindAddress:
    """Where to listen. Port 0: any that is free."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """All of it. The token is in no representation of this. `makes_token`: none was named, so one is made."""

    bind: BindAddress
    roots: tuple[Path, ...]
    token: str | None = field(default=None, repr=False)
    makes_token: bool = False
    state_dir: Path | None = None
    workers: int = 2
    rules: tuple[Path, ...] = ()
    port_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    timeout_s: float = 60.0
    drain_s: float = 30.0
    longest_wait_s: float = 60.0
    requests_per_s: float = 100.0
    worker_memory_bytes: int = 2 << 30
    bounds: RetentionLimits = field(default_factory=RetentionLimits)
    managed: bool = False


def parse_bind(text: str) -> BindAddress:
    """`127.0.0.1:8443`, `[::1]:8443`, `:8443` (every address), `host:0`. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(f"--bind {text}: write it as HOST:PORT, such as 127.0.0.1:8443, or [::1]:8443")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise UsageError(f"--bind {text}: put an IPv6 address into brackets: [{host}]:{port}")
    return BindAddress(host or "0.0.0.0", int(port))


def read_token(file: Path | None, bind: BindAddress, *, without: bool = False) -> str | None:
    """The bearer token, from its file or the environment; None where none is named, which only loopback allows.

    `without`: use none, even if the environment has one. Raises UsageError.
    """
    if without:
        if file is not None:
            raise UsageError(f"--no-token and --token-file {file}: choose one")
        if not is_loopback(bind.host):
            raise UsageError(f"--no-token: others can reach {bind.host}; it goes with a loopback address only")
        return None
    token, where = env.get(env.ATTRSVC_TOKEN), env.ATTRSVC_TOKEN
    if file is not None:
        where = f"--token-file {file}"
        token = secret_in(str(file), key="--token-file").strip()
    if token is None:
        if is_loopback(bind.host):
            return None
        raise UsageError(
            f"--bind {bind.host}: others can reach this address, so a token is needed: name a file (mode 0600) with"
            f" --token-file, or set {env.ATTRSVC_TOKEN}"
        )
    if len(token) < SHORTEST_TOKEN or not token.isascii() or any(char.isspace() for char in token):
        raise UsageError(f"{where}: a token is {SHORTEST_TOKEN} or more ASCII characters without spaces")
    return token
